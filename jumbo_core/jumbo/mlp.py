"""The feed-forward networks of a Jumbo block: timm's Mlp, with fewer passes over memory at inference."""

from __future__ import annotations

import torch
from timm.layers import Mlp
from torch import nn

from jumbo_core.jumbo.packed import PackedLinear
from jumbo_core.modes import hooked, recorded

# Rows (samples) for which a wide network runs its products as weight @ x.T. Measured on a Xeon with AMX, 2 threads,
# fp32, both orders of the shared Jumbo FFN of jumbo_tiny / jumbo_small in ms: 1 row 1.1 / 1.1 and 6.4 / 6.8;
# 2 rows 1.2 / 2.0 and 6.0 / 14.5; 8 rows 2.9 / 2.1 and 17.9 / 12.3; 16 rows 3.0 / 2.1 and 18.5 / 13.5;
# 32 rows 4.5 / 3.4 and 20.5 / 16.0; 64 rows 6.5 / 6.4 and 31.5 / 26.9; 128 rows 11.4 / 11.0 and 52.4 / 46.3.
WEIGHT_FIRST = range(5, 129)


class TightMlp(Mlp):
    """timm's ``Mlp``, same parameters, same results up to rounding; at inference GELU overwrites hidden activations.

    At a batch of 32 these are larger than any cache and fresh memory for their copy costs more than GELU itself. That
    is left to timm's own forward in training, while gradients are on, under torch.compile or tracing, and where hooks
    or replaced layers (adapters, other quantizers) might hold the activations.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)."""
        if self.training or recorded() or not self._plain():
            return super().forward(x)
        return self._tight(x)

    def _tight(self, x: torch.Tensor) -> torch.Tensor:
        if type(self.fc1) is PackedLinear and self.act.approximate == "none":
            return self.fc2(self.fc1(x, gelu=True))
        hidden = torch.ops.aten.gelu_(self.fc1(x), approximate=self.act.approximate)
        if type(self.fc2) is not nn.Linear or not _in_float32_on_cpu(hidden, self.fc2):
            return self.fc2(hidden)
        # torch's own linear layer copies the bias into every row before the product; after it, it finds rows in cache.
        y = torch.mm(hidden.reshape(-1, hidden.shape[-1]), self.fc2.weight.t()).add_(self.fc2.bias)
        return y.view(*hidden.shape[:-1], y.shape[-1])

    def _plain(self) -> bool:
        return (
            type(self.fc1) in (nn.Linear, PackedLinear)
            and type(self.fc2) in (nn.Linear, PackedLinear)
            and type(self.act) is nn.GELU
            and type(self.norm) is nn.Identity
            and not any(drop.training and drop.p for drop in (self.drop1, self.drop2))  # Monte-Carlo dropout
            and not hooked(self.fc1, self.act, self.drop1, self.norm, self.fc2, self.drop2)
        )


class WideMlp(TightMlp):
    """A :class:`TightMlp` for few rows and wide weights, (B, W) -> (B, W): reading the weights is what it costs.

    At inference on a CPU in float32 the products of some tens of rows are taken as ``weight @ x.T``, which the
    processor's matrix library is faster at: the same sums, up to rounding.
    """

    def _tight(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 2 or len(x) not in WEIGHT_FIRST or not _in_float32_on_cpu(x, self.fc1, self.fc2):
            return super()._tight(x)
        hidden = torch.addmm(self.fc1.bias[:, None], self.fc1.weight, x.t())  # (W, B) -> (H, B)
        hidden = torch.ops.aten.gelu_(hidden, approximate=self.act.approximate)
        return torch.addmm(self.fc2.bias[:, None], self.fc2.weight, hidden).t()


def _in_float32_on_cpu(x: torch.Tensor, *layers: nn.Linear) -> bool:
    """Whether ``x`` and the layers' ordinary weights may be multiplied by hand."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and all(type(f.weight) is nn.Parameter and f.weight.dtype == torch.float32 for f in layers)
        and all(f.bias is not None for f in layers)
        and not torch.is_autocast_enabled("cpu")
    )
