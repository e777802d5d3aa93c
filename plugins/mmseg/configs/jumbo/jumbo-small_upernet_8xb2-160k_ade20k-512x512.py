# UPerNet on Jumbo-small, ADE20K.
_base_ = "./jumbo-tiny_upernet_8xb2-160k_ade20k-512x512.py"
pretrained = "https://huggingface.co/antofuller/jumbo/resolve/main/jumbo_small.pth"
model = dict(
    backbone=dict(arch="small", init_cfg=dict(checkpoint=pretrained)),
    neck=dict(embed_dim=384),
    decode_head=dict(in_channels=[384, 384, 384, 384]),
    auxiliary_head=dict(in_channels=384),
)
