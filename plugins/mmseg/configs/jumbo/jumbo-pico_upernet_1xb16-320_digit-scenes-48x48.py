# UPerNet on a small Jumbo model, scenes of handwritten digits in ADE20K's folder layout, for a minute on one CPU.
_base_ = "./jumbo-pico_upernet_1xb4-500_camvid-360x480.py"

iterations = 320
crop_size = (48, 48)
data_root = "data/digit-scenes"
metainfo = dict(
    _delete_=True,
    classes=("background", *(f"digit {i}" for i in range(10))),
    palette=[
        [40, 40, 40], [230, 25, 75], [60, 180, 75], [255, 225, 25], [0, 130, 200], [245, 130, 48], [145, 30, 180],
        [70, 240, 240], [240, 50, 230], [210, 245, 60], [250, 190, 212],
    ],
)  # fmt: skip
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations"),
    dict(type="PackSegInputs"),
]
test_pipeline = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackSegInputs")]
dataset = dict(metainfo=metainfo, ignore_index=255, data_root=data_root)
train_dataloader = dict(
    batch_size=16,
    dataset=dict(
        data_prefix=dict(img_path="images/training", seg_map_path="annotations/training"),
        pipeline=train_pipeline,
        **dataset,
    ),
)
val_dataloader = dict(
    dataset=dict(
        data_prefix=dict(img_path="images/validation", seg_map_path="annotations/validation"),
        pipeline=test_pipeline,
        **dataset,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ignore_index=255)
test_evaluator = val_evaluator

model = dict(
    data_preprocessor=dict(seg_pad_val=255, size=crop_size),
    backbone=dict(num_layers=4, img_size=crop_size, patch_size=4, out_indices=(0, 1, 2, 3)),
    decode_head=dict(
        channels=32,
        ignore_index=255,
        # The host starts the classifier at a tenth of this, which costs a short run most of its iterations.
        init_cfg=dict(type="Normal", std=0.1, override=dict(name="conv_seg")),
        # Most pixels are background: without a weight, saying "background" everywhere is a long-lived optimum.
        loss_decode=dict(class_weight=[0.2, *[1.0] * 10]),
    ),
)
optim_wrapper = dict(optimizer=dict(lr=3e-3))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=32),
    dict(type="PolyLR", eta_min=0.0, power=1.0, begin=32, end=iterations, by_epoch=False),
]
train_cfg = dict(max_iters=iterations, val_interval=iterations)
default_hooks = dict(checkpoint=dict(interval=iterations))
