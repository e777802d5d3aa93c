# The same with token fusion, the paper's plan: prune 56 tokens in each of blocks 1-6, merge 56 (MLERP) in each of 7-12,
# 36 % fewer tokens through the MLPs of 1024 patches. Checkpoints of either config load in the other.
_base_ = "./vit-base_upernet_8xb2-160k_ade20k-512x512.py"
model = dict(backbone=dict(tofu=dict(plan=dict(preset="paper", r=56))))
