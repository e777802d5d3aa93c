# UPerNet on a small Jumbo model, CamVid (367 train and 101 val photos, 360x480, 11 classes) from scratch, for one CPU.
# Photos are halved for the network; predictions are scored against the full-size labels.
_base_ = ["mmseg::_base_/default_runtime.py", "mmseg::_base_/schedules/schedule_20k.py"]
custom_imports = dict(imports=["mmseg_ext"], allow_failed_imports=False)
custom_hooks = [dict(type="PlainMessageHubHook"), dict(type="RandomStateHook")]
randomness = dict(seed=0)

iterations = 500
ignore = 11  # the label of pixels that belong to no class
crop_size = (176, 240)
scale = (240, 180)  # width, height
data_root = "data/camvid"
metainfo = dict(
    classes=(
        "Sky", "Building", "Pole", "Road", "Pavement", "Tree", "SignSymbol", "Fence", "Car", "Pedestrian", "Bicyclist",
    ),
    palette=[
        [128, 128, 128], [128, 0, 0], [192, 192, 128], [128, 64, 128], [60, 40, 222], [128, 128, 0], [192, 128, 128],
        [64, 64, 128], [64, 0, 128], [64, 64, 0], [0, 128, 192],
    ],
)  # fmt: skip
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations"),
    dict(type="RandomResize", scale=scale, ratio_range=(1.0, 1.4), keep_ratio=True),
    dict(type="RandomCrop", crop_size=crop_size, cat_max_ratio=0.75, ignore_index=ignore),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PhotoMetricDistortion"),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=scale, keep_ratio=True),
    dict(type="LoadAnnotations"),  # after Resize: labels keep their size
    dict(type="PackSegInputs"),
]
dataset = dict(
    type="BaseSegDataset",
    metainfo=metainfo,
    ignore_index=ignore,
    reduce_zero_label=False,
    img_suffix=".jpg",
    seg_map_suffix=".png",
    data_root=data_root,
)
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(
        data_prefix=dict(img_path="img_dir/train", seg_map_path="ann_dir/train"), pipeline=train_pipeline, **dataset
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        data_prefix=dict(img_path="img_dir/val", seg_map_path="ann_dir/val"), pipeline=test_pipeline, **dataset
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"], ignore_index=ignore)
test_evaluator = val_evaluator

norm_cfg = dict(type="BN", requires_grad=True)
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(
        type="SegDataPreProcessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=ignore,
        size=crop_size,
    ),
    backbone=dict(
        type="JumboViT",
        arch="pico",
        num_layers=6,
        multiplier=4,
        img_size=crop_size,
        patch_size=8,
        out_indices=(1, 2, 4, 5),
        drop_path_rate=0.0,
        init="short",
    ),
    neck=dict(type="Feature2Pyramid", embed_dim=96, rescales=[2, 1, 0.5, 0.25], norm_cfg=norm_cfg),
    decode_head=dict(
        type="UPerHead",
        in_channels=[96, 96, 96, 96],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=64,
        dropout_ratio=0.1,
        num_classes=11,
        ignore_index=ignore,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="whole"),
)

optim_wrapper = dict(
    _delete_=True,
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
    constructor="JumboLayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=1.0, jumbo_lr_scale=0.3),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type="PolyLR", eta_min=0.0, power=1.0, begin=50, end=iterations, by_epoch=False),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=iterations, val_interval=100)
default_hooks = dict(logger=dict(interval=50), checkpoint=dict(interval=100, max_keep_ckpts=1))
