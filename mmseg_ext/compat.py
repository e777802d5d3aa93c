"""What importing ``mmseg_ext`` changes in the host, all of it in this file.

1. ``sys.modules["mmcv._ext"]``: mmcv-lite ships ``mmcv.ops`` without the compiled operators they call, and four modules
   of mmseg import ``mmcv.ops`` at their top, so that ``import mmseg.models`` fails although a plain ViT needs none of
   the operators. Where the compiled module is absent, a stand-in takes its name; each of its functions raises when
   called. A full mmcv is never touched.
2. ``mmengine.config.utils.MODULE2PACKAGE["mmseg_ext"]``: mmengine resolves ``_base_ = "mmseg_ext::…"`` only for
   packages in this table. The value is the *module* name on purpose: mmengine finds the folder of a distribution named
   otherwise than its module through ``top_level.txt``, which wheels of today no longer carry, and finds modules (wheel
   or editable) by their import path.

Both must happen before the host is used: import ``mmseg_ext`` before ``mmseg.apis`` and before reading a config file
that names ``mmseg_ext::``. ``custom_imports = dict(imports=["mmseg_ext"])`` is early enough for the first, too late for
the second, since ``_base_`` is resolved while the file is read; see :func:`config_path` for what stock tools accept.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_HOSTS = ("mmengine", "mmcv", "mmseg")
_INSTALL = """mmseg_ext needs MMSegmentation with mmcv, and {missing} cannot be found. Install one of
  pip install "jumbo-vit[mmseg-lite]"      mmcv-lite: no compiled operators; enough for these backbones and most heads
  pip install "jumbo-vit[mmseg]"           and, yourself, full mmcv 2.1.0: for heads that need compiled operators
There are two extras because mmcv-lite and full mmcv install the same module: putting one over the other breaks it."""


def prepare_host() -> None:
    """Check that the host is there and make the two changes that the module's text describes; safe to call again.

    Raises:
        ImportError: mmengine, mmcv or mmseg is missing; the message names the extras.
    """
    missing = [name for name in _HOSTS if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(_INSTALL.format(missing=" and ".join(missing)), name=missing[0])
    if importlib.util.find_spec("mmcv._ext") is None:
        sys.modules["mmcv._ext"] = sys.modules["mmcv"]._ext = MissingOperators("mmcv._ext")

    from mmengine.config.utils import MODULE2PACKAGE

    MODULE2PACKAGE.setdefault("mmseg_ext", "mmseg_ext")


class MissingOperators(ModuleType):
    """Stand-in for mmcv's compiled module: has every function, and each raises when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "Stand-in: mmcv-lite has no compiled operators.")
        self.__spec__ = ModuleSpec(name, loader=None)  # no loader: mmcv.utils.check_ops_exist() stays False

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

        def missing_operator(*args, **kwargs):
            raise RuntimeError(
                f"{name} needs full mmcv: mmcv-lite has no compiled operators. Uninstall mmcv-lite, then install "
                f"mmcv==2.1.0 built for your torch"
            )

        return missing_operator


def config_path(name: str) -> str:
    """Absolute path of one of the config files that ship with this package.

    For stock tools, which import nothing before they read a config file, in a file of your own::

        _base_ = __import__("mmseg_ext").config_path("jumbo/jumbo-tiny_upernet_8xb2-160k_ade20k-512x512.py")

    (mmengine evaluates the right side of ``_base_`` as a Python expression.) Once ``mmseg_ext`` has been imported,
    ``_base_ = "mmseg_ext::jumbo/…py"`` does the same.

    Args:
        name: path below ``configs/``.

    Raises:
        FileNotFoundError: no such file; the message lists those there are.
    """
    folder = Path(__file__).parent / ".mim" / "configs"
    path = folder / name
    if not path.is_file():
        known = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.py"))
        raise FileNotFoundError(f"mmseg_ext ships no config {name!r}; there are: {', '.join(known)}")
    return str(path)
