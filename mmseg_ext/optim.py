"""Optimizer groups of the core for MMSegmentation's optim_wrapper."""

from __future__ import annotations

import inspect

from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS
from torch import nn

from jumbo_core.jumbo import BlockStack, param_groups

_OPTIONS = ("layer_decay_rate", "jumbo_lr_scale")


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class JumboLayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Layer-wise learning rates for a Jumbo or Adventurer backbone, the common rate for heads and necks.

    Groups are those of :func:`jumbo_core.jumbo.param_groups`: no weight decay for norms, biases, positions, tokens and
    the scan's decay rates, step sizes and skips, and a slower Jumbo FFN. In a config::

        optim_wrapper = dict(
            type="OptimWrapper",
            optimizer=dict(type="AdamW", lr=1e-4, weight_decay=0.05),
            constructor="JumboLayerDecayOptimWrapperConstructor",
            paramwise_cfg=dict(layer_decay_rate=0.75, jumbo_lr_scale=0.3),
        )

    Args:
        optim_wrapper_cfg: the host's; its ``optimizer`` must name ``lr`` and ``weight_decay``.
        paramwise_cfg: ``layer_decay_rate`` in (0, 1], default 1.0 = off; ``jumbo_lr_scale`` > 0, default 0.3. The
            number of layers is read off the backbone.

    Raises:
        ValueError: an unknown option, ``lr`` or ``weight_decay`` missing, a number out of range, or a model without a
            ``backbone`` that holds an encoder of this library.
    """

    def _validate_cfg(self) -> None:
        unknown = sorted(set(self.paramwise_cfg) - set(_OPTIONS))
        if unknown:
            raise ValueError(
                f"paramwise_cfg knows {_OPTIONS}, got also {unknown} (num_layers is read off the backbone)"
            )
        if self.base_lr is None or self.base_wd is None:
            raise ValueError(
                f"the optimizer must name lr and weight_decay, got {dict(self.optimizer_cfg)}: groups scale the first "
                f"and switch the second off"
            )

    def __call__(self, model: nn.Module) -> OptimWrapper:
        model = getattr(model, "module", model)  # inside a DDP wrapper
        backbone = getattr(model, "backbone", None)
        if backbone is None or not any(isinstance(m, BlockStack) for m in backbone.modules()):
            raise ValueError(
                f"{type(self).__name__} needs a model whose `backbone` is a Jumbo or Adventurer model, "
                f"got {type(model).__name__} with backbone {type(backbone).__name__}"
            )
        optimizer_cfg = dict(self.optimizer_cfg)
        optimizer_type = optimizer_cfg["type"]
        if isinstance(optimizer_type, str):
            with OPTIMIZERS.switch_scope_and_registry(None) as registry:
                optimizer_type = registry.get(optimizer_type)
        # The host asks the optimizer for the name of its first argument, which not all call "params".
        first_argument = next(iter(inspect.signature(optimizer_type).parameters))
        optimizer_cfg[first_argument] = self.groups(model, backbone)
        wrapper_cfg = {"type": "OptimWrapper", **self.optim_wrapper_cfg}
        return OPTIM_WRAPPERS.build(wrapper_cfg, default_args=dict(optimizer=OPTIMIZERS.build(optimizer_cfg)))

    def groups(self, model: nn.Module, backbone: nn.Module) -> list[dict]:
        """Optimizer groups: the backbone's, then those of everything else at the common rate."""
        rest = nn.Module()
        for name, child in model.named_children():
            if child is not backbone:
                rest.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            rest.register_parameter(name, parameter)
        groups = []
        if any(p.requires_grad for p in backbone.parameters()):
            decay = self.paramwise_cfg.get("layer_decay_rate", 1.0)
            scale = self.paramwise_cfg.get("jumbo_lr_scale", 0.3)
            groups += param_groups(backbone, self.base_lr, self.base_wd, jumbo_lr_scale=scale, layer_decay=decay)
        if any(p.requires_grad for p in rest.parameters()):
            groups += param_groups(rest, self.base_lr, self.base_wd, jumbo_lr_scale=1.0)
        if not groups:
            raise ValueError("every parameter is frozen: there is nothing to optimise")
        return groups
