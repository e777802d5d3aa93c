# UPerNet on Jumbo-tiny, ADE20K, with token fusion; the Jumbo token is never fused.
_base_ = "../jumbo/jumbo-tiny_upernet_8xb2-160k_ade20k-512x512.py"
model = dict(backbone=dict(tofu=dict(plan=dict(preset="paper", r=56))))
