# UPerNet on a plain ViT-B of timm, ADE20K, 512x512 crops, 160,000 iterations with 8 GPUs x 2 images. No fusion here:
# train with this one, test with vit-base-tofu_…, or train with that at once.
_base_ = "../jumbo/jumbo-tiny_upernet_8xb2-160k_ade20k-512x512.py"

crop_size = (512, 512)
# A folder or file of timm: https://huggingface.co/timm/vit_base_patch16_224.augreg2_in21k_ft_in1k
# To train from scratch: --cfg-options model.backbone.init_cfg=None
pretrained = "pretrain/vit_base_patch16_224.augreg2_in21k_ft_in1k"
data_preprocessor = dict(mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5])  # of these weights
model = dict(
    data_preprocessor=data_preprocessor,
    backbone=dict(
        _delete_=True,
        type="ToFuViT",
        model_name="vit_base_patch16_224",
        img_size=crop_size,
        out_indices=(2, 5, 8, 11),
        drop_path_rate=0.1,
        init_cfg=dict(type="Pretrained", checkpoint=pretrained),
    ),
    neck=dict(embed_dim=768),
    decode_head=dict(in_channels=[768, 768, 768, 768]),
    auxiliary_head=dict(in_channels=768),
)
# The host's own constructor: no weight decay for positions, tokens and norms.
optim_wrapper = dict(
    _delete_=True,
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01),
    paramwise_cfg=dict(
        custom_keys={
            "pos_embed": dict(decay_mult=0.0),
            "cls_token": dict(decay_mult=0.0),
            "norm": dict(decay_mult=0.0),
        }
    ),
)
