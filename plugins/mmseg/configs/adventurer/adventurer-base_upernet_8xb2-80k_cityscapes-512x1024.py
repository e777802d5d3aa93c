# UPerNet on Adventurer-base, a student distilled from a ViT, Cityscapes.
_base_ = "./adventurer-tiny_upernet_8xb2-80k_cityscapes-512x1024.py"
pretrained = "distilled/adventurer-base"
model = dict(
    backbone=dict(arch="base", init_cfg=dict(checkpoint=pretrained)),
    neck=dict(embed_dim=768),
    decode_head=dict(in_channels=[768, 768, 768, 768]),
    auxiliary_head=dict(in_channels=768),
)
