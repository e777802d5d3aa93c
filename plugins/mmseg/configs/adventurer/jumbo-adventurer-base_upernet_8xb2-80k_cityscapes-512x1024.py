# UPerNet on Jumbo-linear base (our own combination: Adventurer with a Jumbo token), a distilled student, Cityscapes.
_base_ = "./adventurer-base_upernet_8xb2-80k_cityscapes-512x1024.py"
pretrained = "distilled/jumbo-adventurer-base"
model = dict(backbone=dict(arch="jumbo_base", init_cfg=dict(checkpoint=pretrained)))
