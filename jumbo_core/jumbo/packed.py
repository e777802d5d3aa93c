"""Linear layers whose float32 weights lie ready in the order that the processor's products read them in."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from jumbo_core.jumbo.stamps import stamp
from jumbo_core.modes import recorded

# Multiply-adds of a product from which packed weights pay. Measured with 2 threads on whole models with an int8 Jumbo
# FFN, packed / not, in ms: jumbo_tiny at batch 1 (29 M in an MLP's layer) 29.9 / 28.4, at batch 8 108 / 114;
# jumbo_small at batch 1 (116 M) 61 / 65, at batch 8 295 / 311.
LEAST = 2**26


class PackedLinear(nn.Linear):
    """``nn.Linear`` with the same parameters and state dict; on a CPU it keeps a second copy of the weights, packed.

    torch's own float32 product packs the weights in every call, copies the bias into the output first and leaves GELU
    to a pass of its own. oneDNN's, which torch's compiler lowers linear layers to, does neither when the weights are
    packed once. Used in eager inference in float32, for products large enough; the rest is ``nn.Linear``'s.
    """

    @classmethod
    def take_over(cls, linear: nn.Linear) -> None:
        """Make a plain ``nn.Linear`` one of these, in place; its parameters and hooks stay."""
        linear.__class__ = cls

    def forward(self, x: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
        """(..., in) -> (..., out), through (exact) GELU if asked for."""
        if not self._packs(x):
            y = F.linear(x, self.weight, self.bias)
            return y if not gelu else F.gelu(y) if recorded() else torch.ops.aten.gelu_(y)
        return torch.ops.mkldnn._linear_pointwise(
            x, self._packed(), self.bias, "gelu" if gelu else "none", [], "none" if gelu else ""
        )

    def _packs(self, x: torch.Tensor) -> bool:
        return (
            not recorded()
            and x.device.type == self.weight.device.type == "cpu"
            and x.dtype == self.weight.dtype == torch.float32
            and type(x) is torch.Tensor
            and type(self.weight) is nn.Parameter
            and not self.weight.is_inference()  # changes unseen, and to pack it in every call does not pay
            and x.numel() * self.out_features >= LEAST
            and not torch.is_autocast_enabled("cpu")
            and torch.backends.mkldnn.is_available()
        )

    def _packed(self) -> torch.Tensor:
        now, ready = stamp(self.weight), self.__dict__.get("_ready")
        if ready is None or ready[0] != now or ready[2] is not self.weight:
            with torch.inference_mode(False), torch.no_grad():
                # The number of rows is a hint for the order; any other number is multiplied as well.
                packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().clone(), 1024)
            self.__dict__["_ready"] = ready = now, packed, self.weight  # held: no other takes its address
        return ready[1]

    def _load_from_state_dict(self, *arguments) -> None:
        super()._load_from_state_dict(*arguments)
        self.__dict__.pop("_ready", None)

    def _apply(self, *arguments, **options) -> PackedLinear:
        self.__dict__.pop("_ready", None)  # .half().float() may end at the address where it began, with other values
        return super()._apply(*arguments, **options)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_ready"}
