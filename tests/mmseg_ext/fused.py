"""Small backbones to fuse, of MMSegmentation and of timm, and what their fused maps must be."""

import torch
from torch import nn

import mmseg_ext  # noqa: F401 (before mmseg.models)

# isort: split
from mmseg.models.backbones import VisionTransformer

from mmseg_ext import ToFuViT

DEPTH = 3
PLAN = dict(ops=["prune", "average", "mlerp"], counts=[3, 2, 4])
OPTIONS = [
    {},
    dict(proportional=True, norm="mean"),
    dict(proportional=True, importance="attention"),
    dict(weights="size"),
]
SIZES = dict(embed_dim=32, depth=DEPTH, num_heads=2, patch_size=8, mlp_ratio=4)
MMSEG = dict(
    img_size=(32, 32), patch_size=8, embed_dims=32, num_layers=DEPTH, num_heads=2, patch_bias=True,
    norm_cfg=dict(type="LN", eps=1e-6), out_indices=(0, 1, 2),
)  # fmt: skip


def tofu_vit(name: str = "test_vit", **options) -> ToFuViT:
    options = {"img_size": 32, "model_options": SIZES, "out_indices": (0, 1, 2), **options}
    return randomised(ToFuViT(name, **options)).eval()


def mmseg_vit(cls: type = VisionTransformer, **options) -> VisionTransformer:
    model = randomised(cls(**{**MMSEG, **options}))
    model.eval()  # which the host's backbone does not hand on
    return model


def randomised(model: nn.Module) -> nn.Module:
    """Weights at which no token is like another and nothing is silent; the same for equal shapes."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return model


def as_timm(state: dict[str, torch.Tensor], depth: int = DEPTH) -> dict[str, torch.Tensor]:
    """Weights of the host's ViT under timm's names."""
    out = {"cls_token": state["cls_token"], "pos_embed": state["pos_embed"]}
    for kind in ("weight", "bias"):
        out[f"patch_embed.proj.{kind}"] = state[f"patch_embed.projection.{kind}"]
        if f"ln1.{kind}" in state:
            out[f"norm.{kind}"] = state[f"ln1.{kind}"]
        names = {"norm1": "ln1", "norm2": "ln2", "attn.proj": "attn.attn.out_proj", "mlp.fc1": "ffn.layers.0.0"}
        for i in range(depth):
            for ours, theirs in {**names, "mlp.fc2": "ffn.layers.1"}.items():
                out[f"blocks.{i}.{ours}.{kind}"] = state[f"layers.{i}.{theirs}.{kind}"]
            out[f"blocks.{i}.attn.qkv.{kind}"] = state[f"layers.{i}.attn.attn.in_proj_{kind}"]
    return out


def assert_positions_hold_their_groups(y: torch.Tensor, handle, prefix: int = 0) -> None:
    """Positions of one group are equal, positions of different groups are not."""
    vectors = y.flatten(2).transpose(1, 2)  # (B, D, h, w) -> (B, N, D)
    place = handle.place()[:, prefix:]
    same = place.unsqueeze(1) == place.unsqueeze(2)
    assert torch.equal((torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist") == 0), same)
