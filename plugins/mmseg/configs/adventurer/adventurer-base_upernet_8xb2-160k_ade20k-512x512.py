# UPerNet on Adventurer-base, a student distilled from a ViT, ADE20K.
_base_ = "./adventurer-tiny_upernet_8xb2-160k_ade20k-512x512.py"
pretrained = "distilled/adventurer-base"
model = dict(
    backbone=dict(arch="base", init_cfg=dict(checkpoint=pretrained)),
    neck=dict(embed_dim=768),
    decode_head=dict(in_channels=[768, 768, 768, 768]),
    auxiliary_head=dict(in_channels=768),
)
