# UPerNet on Jumbo-base, ADE20K.
_base_ = "./jumbo-tiny_upernet_8xb2-160k_ade20k-512x512.py"
pretrained = "https://huggingface.co/antofuller/jumbo/resolve/main/jumbo_base.pth"
model = dict(
    backbone=dict(arch="base", init_cfg=dict(checkpoint=pretrained)),
    neck=dict(embed_dim=768),
    decode_head=dict(in_channels=[768, 768, 768, 768]),
    auxiliary_head=dict(in_channels=768),
)
