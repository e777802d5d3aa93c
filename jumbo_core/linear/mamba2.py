"""The Mamba-2 mixer: projection, short causal convolution, state-space scan, gated norm, projection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from jumbo_core import checks
from jumbo_core.linear.inside import walk
from jumbo_core.linear.running import runs
from jumbo_core.linear.ssd import BACKENDS, chunk_for, ssd_scan
from jumbo_core.linear.steps import accumulation_dtype, stretches
from jumbo_core.modes import hooked

# Tokens, over all samples, that go through the mixer at once at inference: what lies between its projections is then
# small enough for caches, and for memory that is still at hand; a system's fresh pages cost as much as small operators.
SPAN = 1024


class MixerState(NamedTuple):
    """All that streaming carries from step to step, whatever the length so far.

    inputs (B, kernel - 1, channels): the convolution's last inputs. ssm (B, H, P, N): the scan's state.
    """

    inputs: torch.Tensor
    ssm: torch.Tensor


class GatedRMSNorm(nn.Module):
    """``weight * rmsnorm(y * silu(gate))`` over the last axis, in fp32 whatever the input."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """(…, dim), (…, dim) -> (…, dim) in the dtype of ``y``."""
        wide = accumulation_dtype(y.dtype)
        gated = y.to(wide) * F.silu(gate.to(wide))
        return F.rms_norm(gated, gated.shape[-1:], self.weight.to(wide), self.eps).to(y.dtype)


class Mamba2Mixer(nn.Module):
    """Mamba-2 with one group of B and C: (B, L, D) -> (B, L, D), causal, in time linear in L.

    Source: Mamba-2 (arXiv 2405.21060) with the options of the released Adventurer code; parameter names are those of
    the released files and of Transformers' Mamba-2, so weights go over as they are.

    Args:
        dim: width D.
        d_state: state size N per channel. Default 64.
        head_dim: channels P of a head; must divide ``expand * dim``. Default 64.
        expand: inner width over D. Default 2.
        conv_kernel: steps of the causal convolution. Default 4.
        norm_eps: epsilon of the gated norm. Default 1e-5.
        chunk_size, backend: of the scan, see :func:`ssd_scan`. Default "auto".

    A_log, D and dt_bias are used in fp32 under autocast, and so is all that the scan accumulates.

    Raises:
        ValueError: a size below 1 or a head size that does not divide the inner width (all numbers are named).
    """

    def __init__(
        self,
        dim: int,
        *,
        d_state: int = 64,
        head_dim: int = 64,
        expand: float = 2,
        conv_kernel: int = 4,
        norm_eps: float = 1e-5,
        chunk_size: int | str = "auto",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.dim, self.d_state = checks.integer("dim", dim), checks.integer("d_state", d_state)
        self.head_dim = checks.integer("head_dim", head_dim)
        self.conv_kernel = checks.integer("conv_kernel", conv_kernel)
        self.inner = int(dim * checks.positive("expand", expand))
        if not self.inner or self.inner % head_dim:
            raise ValueError(
                f"head_dim {head_dim} does not divide the inner width {self.inner} (expand {expand} x dim {dim})"
            )
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        self.num_heads = self.inner // head_dim
        self.chunk_size = chunk_size if chunk_size == "auto" else checks.integer("chunk_size", chunk_size)
        self.backend = backend
        channels = self.inner + 2 * d_state  # x, B and C pass through the convolution
        self.in_proj = nn.Linear(dim, self.inner + channels + self.num_heads, bias=False)  # [z | x B C | dt]
        self.conv1d = nn.Conv1d(channels, channels, conv_kernel, groups=channels, padding=conv_kernel - 1)
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.norm = GatedRMSNorm(self.inner, norm_eps)
        self.out_proj = nn.Linear(self.inner, dim, bias=False)
        self.reset_decay()

    def reset_decay(self, keep: Callable[[torch.Tensor], bool] = lambda parameter: False) -> None:
        """Mamba-2's start: A in [1, 16], step sizes log-uniform in [0.001, 0.1], skip weights 1.

        ``keep``: of the three parameters, which to leave as they are, say because a file has filled them. Default none.
        """
        with torch.no_grad():
            a = torch.empty_like(self.A_log).uniform_(1, 16)
            dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
            start = {
                self.A_log: a.log(),
                self.dt_bias: dt + torch.log(-torch.expm1(-dt)),  # softplus of it is dt
                self.D: torch.ones_like(self.D),
            }
            for parameter, value in start.items():
                if not keep(parameter):
                    parameter.copy_(value)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        state: MixerState | None = None,
        return_state: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, MixerState]:
        """Mix a sequence (B, L, D).

        Args:
            mask: (B, L) bool, True = real. Padding before, after or between real steps counts as nothing at all for
                padding before and after them; between, it still parts the convolution's neighbours. Its output is 0.
            state: continue after what this state has seen; not together with ``mask``. Default None: the beginning.
            return_state: also return the state after the last step, to continue with :meth:`step`.
        """
        if x.ndim != 3 or x.shape[-1] != self.dim or not x.shape[1]:
            raise ValueError(f"Mamba2Mixer expects (B, L, {self.dim}) with L > 0, got {tuple(x.shape)}")
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
                raise ValueError(
                    f"mask must be bool (B, L) = {tuple(x.shape[:2])}, got {mask.dtype} {tuple(mask.shape)}"
                )
            if state is not None:
                raise ValueError("mask with state: padding would part the steps from those before; pass real ones only")
            x = x.masked_fill(~mask[..., None], 0)
        if return_state and mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("return_state needs sequences that end in real steps: pad them at the front")
        y = last = None
        for part, of_part, after in self._parts(x, mask, state, return_state):
            last = after
            if of_part.shape[1] == x.shape[1]:
                y = of_part
            else:
                y = of_part.new_empty(x.shape) if y is None else y
                y[:, part] = of_part
        return (y, last) if return_state else y

    def add_to(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``h + mixer(x)[:, 1:]`` for x (B, L + 1, D) and h (B, L, D), which stays as it is: a block's first half.

        The sum is taken while the part's outputs are in the cache, so that those of the sequence never lie in memory.
        """
        out = None
        for part, y, _ in self._parts(x, None, None, False):
            begin = max(part.start, 1)
            rows, y = h[:, begin - 1 : part.stop - 1], y[:, begin - part.start :]
            if out is None:
                out = h.new_empty(h.shape, dtype=torch.result_type(h, y))
            torch.add(rows, y, out=out[:, begin - 1 : part.stop - 1])
        return out

    def _parts(
        self, x: torch.Tensor, mask: torch.Tensor | None, state: MixerState | None, go_on: bool
    ) -> Iterator[tuple[slice, torch.Tensor, MixerState | None]]:
        """Parts of a sequence one after the other, their outputs and the states after them."""
        length, span = x.shape[1], x.shape[1]
        if self._walks(x, self.in_proj, self.out_proj):
            span = max(SPAN // len(x), SPAN // 4)
        for part in stretches(length, span):
            last = part.stop == length
            of_mask = None if mask is None else mask[:, part]
            y, state = self._run(x[:, part], of_mask, state, go_on or not last)
            yield part, y, state

    def _run(
        self, x: torch.Tensor, mask: torch.Tensor | None, state: MixerState | None, go_on: bool
    ) -> tuple[torch.Tensor, MixerState | None]:
        """Outputs for a sequence or a part of one, padding in x set to 0; with ``go_on`` the state after it."""
        if self._walks(x):
            return self._run_in_chunks(x, mask, state, go_on)
        gate, xbc, dt = self._project(x)
        mixed = self._convolve(xbc, None if state is None else state.inputs)
        y, ssm = self._scan(gate, mixed, self._step_sizes(dt), mask, state)
        return self._out(y, mask), MixerState(self._window(xbc, state), ssm) if go_on else None

    def _run_in_chunks(
        self, x: torch.Tensor, mask: torch.Tensor | None, state: MixerState | None, go_on: bool
    ) -> tuple[torch.Tensor, MixerState | None]:
        """The same, convolution, scan, gate and norm chunk by chunk."""
        before, inner = self.conv_kernel - 1, self.inner
        if len(x) == 1 and self._multiplies_plainly(x):  # what came before stands above: nothing is copied for it
            rows = x.new_empty(1, before + x.shape[1], self.in_proj.out_features)
            torch.mm(x[0], self.in_proj.weight.t(), out=rows[0, before:])
        else:
            projected = self.in_proj(x)
            rows = projected.new_empty(len(x), before + x.shape[1], projected.shape[2])
            rows[:, before:] = projected
        if state is None:
            state = self.empty_state(len(x), dtype=rows.dtype)
        xbc = rows[..., inner : -self.num_heads]
        xbc[:, :before] = state.inputs
        dt = self._step_sizes(rows[:, before:, -self.num_heads :])
        dt = dt if mask is None else dt.masked_fill(~mask[..., None], 0)  # the end of padding's part in the state
        chunk_size = chunk_for(x.shape, running=True) if self.chunk_size == "auto" else self.chunk_size
        with torch.autocast(x.device.type, enabled=False):
            y, ssm = walk(self, rows, dt, state.ssm.to(dt.dtype), chunk_size)
        # A view of the last inputs would hold on to all of them.
        state = MixerState(xbc[:, x.shape[1] :].clone(), ssm) if go_on else None
        return self._out(y, mask), state

    def _out(self, y: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = self.out_proj(y)
        return y if mask is None else y.masked_fill(~mask[..., None], 0)

    def _walks(self, x: torch.Tensor, *others: nn.Module) -> bool:
        """Whether all that lies between the projections goes chunk by chunk; nobody may wait for it to be called, nor
        for ``others``."""
        free = type(self.conv1d) is nn.Conv1d and not hooked(self.norm, self.conv1d, *others)
        return self.backend in ("auto", "torch") and runs(x) and len(x) > 0 and free

    def _multiplies_plainly(self, x: torch.Tensor) -> bool:
        """Whether the input projection may be multiplied by hand: a plain layer of the inputs' dtype, no autocast."""
        layer = self.in_proj
        return (
            type(layer) is nn.Linear
            and type(layer.weight) is nn.Parameter
            and type(x) is torch.Tensor
            and layer.bias is None
            and layer.weight.dtype == x.dtype
            and not hooked(layer)
            and not torch.is_autocast_enabled("cpu")
        )

    def _scan(self, gate, mixed, dt, mask, state) -> tuple[torch.Tensor, torch.Tensor]:
        inner, B, C = mixed.split([self.inner, self.d_state, self.d_state], dim=-1)
        y, ssm = ssd_scan(
            inner.unflatten(-1, (self.num_heads, self.head_dim)),
            dt,
            self._decay(),
            B,
            C,
            self.D,
            chunk_size=self.chunk_size,
            initial_state=None if state is None else state.ssm,
            mask=mask,
            backend=self.backend,
        )
        return self.norm(y.flatten(2), gate), ssm

    def step(self, x: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, MixerState]:
        """One step of streaming: (B, D) -> (B, D) and the next state; cost and memory do not grow with the past.

        The given state is not modified.
        """
        if x.ndim != 2 or x.shape[-1] != self.dim or len(x) != len(state.ssm):
            raise ValueError(f"step expects ({len(state.ssm)}, {self.dim}) for this state, got {tuple(x.shape)}")
        gate, xbc, dt = self._project(x)
        window = torch.cat([state.inputs, xbc[:, None]], dim=1)  # (B, kernel, channels)
        mixed = (window * self.conv1d.weight[:, 0].t()).sum(1)
        mixed = F.silu(mixed if self.conv1d.bias is None else mixed + self.conv1d.bias)
        inner, B, C = (t.to(state.ssm.dtype) for t in mixed.split([self.inner, self.d_state, self.d_state], dim=-1))
        inner = inner.unflatten(-1, (self.num_heads, self.head_dim))  # (B, H, P)
        dt = self._step_sizes(dt)  # (B, H)
        kept = torch.exp(dt * self._decay())[..., None, None] * state.ssm
        ssm = kept + (dt[..., None] * inner)[..., None] * B[:, None, None]  # (B, H, P, N)
        y = (ssm * C[:, None, None]).sum(-1) + self.D[:, None] * inner
        y = self.out_proj(self.norm(y.flatten(1).to(x.dtype), gate))
        return y, MixerState(window[:, 1:], ssm)

    def empty_state(self, batch: int, *, dtype: torch.dtype | None = None) -> MixerState:
        """The state before the first step; ``dtype`` of the activations, default that of the weights."""
        like = self.in_proj.weight
        inputs = like.new_zeros(batch, self.conv_kernel - 1, self.conv1d.in_channels, dtype=dtype)
        shape = (batch, self.num_heads, self.head_dim, self.d_state)
        return MixerState(inputs, like.new_zeros(shape, dtype=accumulation_dtype(inputs.dtype)))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        channels = self.inner + 2 * self.d_state
        return self.in_proj(x).split([self.inner, channels, self.num_heads], dim=-1)

    def _convolve(self, xbc: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Causal convolution over steps and SiLU: (B, L, channels) -> (B, L, channels)."""
        length = xbc.shape[1]
        if before is not None:
            xbc = torch.cat([before.to(xbc.dtype), xbc], dim=1)
        return F.silu(self.conv1d(xbc.transpose(1, 2))[..., xbc.shape[1] - length : xbc.shape[1]]).transpose(1, 2)

    def _window(self, xbc: torch.Tensor, state: MixerState | None) -> torch.Tensor:
        """The last kernel - 1 inputs of the convolution, zeros where the sequence had not begun."""
        kept = self.conv_kernel - 1
        if xbc.shape[1] >= kept:
            return xbc[:, xbc.shape[1] - kept :].clone()  # a view would hold on to all of them
        before = self.empty_state(len(xbc), dtype=xbc.dtype).inputs if state is None else state.inputs.to(xbc.dtype)
        return torch.cat([before, xbc], dim=1)[:, xbc.shape[1] :]

    def _step_sizes(self, dt: torch.Tensor) -> torch.Tensor:
        wide = accumulation_dtype(dt.dtype)
        return F.softplus(dt.to(wide) + self.dt_bias.to(wide))

    def _decay(self) -> torch.Tensor:
        return -torch.exp(self.A_log.to(accumulation_dtype(self.A_log.dtype)))
