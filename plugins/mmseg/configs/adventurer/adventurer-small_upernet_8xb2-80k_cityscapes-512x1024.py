# UPerNet on Adventurer-small, a student distilled from a ViT, Cityscapes.
_base_ = "./adventurer-tiny_upernet_8xb2-80k_cityscapes-512x1024.py"
pretrained = "distilled/adventurer-small"
model = dict(
    backbone=dict(arch="small", init_cfg=dict(checkpoint=pretrained)),
    neck=dict(embed_dim=512),
    decode_head=dict(in_channels=[512, 512, 512, 512]),
    auxiliary_head=dict(in_channels=512),
)
