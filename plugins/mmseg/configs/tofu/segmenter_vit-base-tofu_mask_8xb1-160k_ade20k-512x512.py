# MMSegmentation's Segmenter on its own ViT-B, with token fusion: the type and the plan are all that is new, and its
# published checkpoints load as they are.
_base_ = "mmseg::segmenter/segmenter_vit-b_mask_8xb1-160k_ade20k-512x512.py"
custom_imports = dict(imports=["mmseg_ext"], allow_failed_imports=False)
custom_hooks = [dict(type="PlainMessageHubHook"), dict(type="RandomStateHook")]
model = dict(backbone=dict(type="ToFuVisionTransformer", tofu=dict(plan=dict(preset="paper", r=56))))
