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
    """Whether somebody records what happens here, autograd or :func:`traced`: then nothing may be overwritten."""
    return torch.is_grad_enabled() or traced()


def traced() -> bool:
    """Whether a compiler, a tracer, a transform of torch.func or forward-mode autograd looks at every operator."""
    return (
        torch.compiler.is_compiling()  # the rest is not asked then: a compiler would have to follow it
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def hooked(*modules: nn.Module) -> bool:
    """Whether somebody would notice that these modules are not called, or that their outputs are overwritten."""
    return nn.modules.module._has_any_global_hook() or any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules
    )
