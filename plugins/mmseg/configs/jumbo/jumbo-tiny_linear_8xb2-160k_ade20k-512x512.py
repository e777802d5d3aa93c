# A single linear layer on the last map of Jumbo-tiny, ADE20K: what the features give without a decoder.
_base_ = "./jumbo-tiny_upernet_8xb2-160k_ade20k-512x512.py"
model = dict(
    backbone=dict(out_indices=-1, final_norm=True),
    neck=None,
    decode_head=dict(
        _delete_=True,
        type="FCNHead",
        in_channels=192,
        in_index=0,
        channels=192,
        num_convs=0,
        concat_input=False,
        dropout_ratio=0.0,
        num_classes=150,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
    ),
    auxiliary_head=None,
)
