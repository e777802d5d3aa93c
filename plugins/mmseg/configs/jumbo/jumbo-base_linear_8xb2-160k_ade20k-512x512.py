# A single linear layer on the last map of Jumbo-base, ADE20K.
_base_ = "./jumbo-tiny_linear_8xb2-160k_ade20k-512x512.py"
pretrained = "https://huggingface.co/antofuller/jumbo/resolve/main/jumbo_base.pth"
model = dict(
    backbone=dict(arch="base", init_cfg=dict(checkpoint=pretrained)),
    decode_head=dict(in_channels=768, channels=768),
)
