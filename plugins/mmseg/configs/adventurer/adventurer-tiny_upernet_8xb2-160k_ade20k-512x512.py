# UPerNet on Adventurer-tiny, a student distilled from a ViT, ADE20K, 512x512 crops, 160,000 iterations with
# 8 GPUs x 2 images.
_base_ = "../jumbo/jumbo-tiny_upernet_8xb2-160k_ade20k-512x512.py"

crop_size = (512, 512)
# The folder in which the distillation recipe saved its student; a published .pth, a .safetensors file or a checkpoint
# of timm or MMSegmentation works as well: --cfg-options model.backbone.init_cfg.checkpoint=…
# To train from scratch: --cfg-options model.backbone.init_cfg=None
pretrained = "distilled/adventurer-tiny"
model = dict(
    backbone=dict(
        _delete_=True,
        type="AdventurerViT",
        arch="tiny",
        img_size=crop_size,
        out_indices=(2, 5, 8, 11),
        drop_path_rate=0.1,
        init_cfg=dict(type="Pretrained", checkpoint=pretrained),
    ),
    neck=dict(embed_dim=256),
    decode_head=dict(in_channels=[256, 256, 256, 256]),
    auxiliary_head=dict(in_channels=256),
)
