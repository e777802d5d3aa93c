"""Backbones, hooks and optimizer groups for MMSegmentation; importing this registers them with mmseg.

In a config file: ``custom_imports = dict(imports=["mmseg_ext"], allow_failed_imports=False)``. In Python: import
``mmseg_ext`` before ``mmseg.apis`` (see :mod:`mmseg_ext.compat`).
"""

from mmseg_ext.compat import config_path, prepare_host

prepare_host()

from mmseg_ext.backbones import AdventurerViT, JumboViT  # noqa: E402
from mmseg_ext.checkpoints import load_pretrained  # noqa: E402
from mmseg_ext.hooks import PlainMessageHubHook, RandomStateHook  # noqa: E402
from mmseg_ext.optim import JumboLayerDecayOptimWrapperConstructor  # noqa: E402
from mmseg_ext.timm_vit import ToFuViT  # noqa: E402
from mmseg_ext.tofu import ToFuVisionTransformer  # noqa: E402

__all__ = [
    "AdventurerViT",
    "JumboLayerDecayOptimWrapperConstructor",
    "JumboViT",
    "PlainMessageHubHook",
    "RandomStateHook",
    "ToFuViT",
    "ToFuVisionTransformer",
    "config_path",
    "load_pretrained",
]
