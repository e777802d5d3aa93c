"""Modes a model is in: training or eval for a while, recorded or not, hooked or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for every module inside; each is put back as it was, whichever mode that was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def recorded() -> bool:
    """Whether somebody records what happens here, autograd, a compiler or a tracer: then nothing may be overwritten."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing()


def hooked(*modules: nn.Module) -> bool:
    """Whether somebody would notice that these modules are not called, or that their outputs are overwritten."""
    return any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules)
