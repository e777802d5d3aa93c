# UPerNet on Jumbo-tiny, ADE20K, 512x512 crops, 160,000 iterations with 8 GPUs x 2 images.
_base_ = [
    "mmseg::_base_/datasets/ade20k.py",
    "mmseg::_base_/default_runtime.py",
    "mmseg::_base_/schedules/schedule_160k.py",
]
custom_imports = dict(imports=["mmseg_ext"], allow_failed_imports=False)
# Checkpoints that load with torch.load(weights_only=True), and resume where they stopped, random state included.
custom_hooks = [dict(type="PlainMessageHubHook"), dict(type="RandomStateHook")]

crop_size = (512, 512)
norm_cfg = dict(type="SyncBN", requires_grad=True)
data_preprocessor = dict(
    type="SegDataPreProcessor",
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
    bgr_to_rgb=True,
    pad_val=0,
    seg_pad_val=255,
    size=crop_size,
)
# Released weights; a local path (.pth, .safetensors, a Transformers folder) works as well as this address.
# To train from scratch: --cfg-options model.backbone.init_cfg=None
pretrained = "https://huggingface.co/antofuller/jumbo/resolve/main/jumbo_tiny.pth"
model = dict(
    type="EncoderDecoder",
    data_preprocessor=data_preprocessor,
    backbone=dict(
        type="JumboViT",
        arch="tiny",
        img_size=crop_size,
        out_indices=(2, 5, 8, 11),
        drop_path_rate=0.1,
        init_cfg=dict(type="Pretrained", checkpoint=pretrained),
    ),
    neck=dict(type="Feature2Pyramid", embed_dim=192, rescales=[4, 2, 1, 0.5], norm_cfg=norm_cfg),
    decode_head=dict(
        type="UPerHead",
        in_channels=[192, 192, 192, 192],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=512,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
    ),
    auxiliary_head=dict(
        type="FCNHead",
        in_channels=192,
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=0.4),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="slide", crop_size=crop_size, stride=(341, 341)),
)

# tools/train.py --amp turns this into AmpOptimWrapper, which needs a GPU.
optim_wrapper = dict(
    _delete_=True,
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    constructor="JumboLayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.75, jumbo_lr_scale=0.3),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type="PolyLR", eta_min=0.0, power=1.0, begin=1500, end=160000, by_epoch=False),
]
train_dataloader = dict(batch_size=2)
val_dataloader = dict(batch_size=1)
test_dataloader = val_dataloader
