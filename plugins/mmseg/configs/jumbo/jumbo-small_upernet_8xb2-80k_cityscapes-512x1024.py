# UPerNet on Jumbo-small, Cityscapes.
_base_ = "./jumbo-tiny_upernet_8xb2-80k_cityscapes-512x1024.py"
pretrained = "https://huggingface.co/antofuller/jumbo/resolve/main/jumbo_small.pth"
model = dict(
    backbone=dict(arch="small", init_cfg=dict(checkpoint=pretrained)),
    neck=dict(embed_dim=384),
    decode_head=dict(in_channels=[384, 384, 384, 384]),
    auxiliary_head=dict(in_channels=384),
)
