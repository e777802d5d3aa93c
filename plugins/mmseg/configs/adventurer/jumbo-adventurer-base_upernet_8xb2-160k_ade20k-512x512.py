# UPerNet on Jumbo-linear base (our own combination: Adventurer with a Jumbo token), a distilled student, ADE20K.
_base_ = "./adventurer-base_upernet_8xb2-160k_ade20k-512x512.py"
pretrained = "distilled/jumbo-adventurer-base"
model = dict(backbone=dict(arch="jumbo_base", init_cfg=dict(checkpoint=pretrained)))
