"""The Jumbo FFN with small weights, for inference: int8 or bfloat16. The one place that chooses how it is computed.

A Jumbo FFN is run on one token per sample and block, so at a small batch its time is that of reading its weights. On a
Xeon with AMX (2 threads, torch 2.14, medians of 7 interleaved rounds, the whole FFN of jumbo_tiny / jumbo_small in ms):

    batch                                             1             8            32
    float32                                       1.3 / 6.1     2.7 / 16.5    4.5 / 24.5
    bfloat16, F.linear                            1.3 / 4.5     1.3 / 4.0     1.6 / 5.5
    float16, F.linear                             1.5 / 6.6     2.0 / 7.0     3.7 / 13.6
    int8, onednn.qlinear_pointwise (chosen)       0.7 / 1.4     0.8 / 1.8     1.0 / 2.4
    int8, quantized.linear_dynamic (fbgemm)       0.6 / 1.5     0.8 / 2.4     1.4 / 4.5
    int8, quantized.linear_dynamic (onednn)       0.8 / 2.0     0.8 / 2.1     1.1 / 3.0
    int8, _int_mm                                 0.9 / 2.8     1.1 / 2.9     1.5 / 3.9
    int8 weights, _weight_int8pack_mm (bfloat16)  0.6 / 2.1     1.4 / 5.6     4.9 / 17.7
    int8 weights, _weight_int8pack_mm (float32)   3.4 / 13.2    24 / 95       99 / 378

Chosen is the operator that torch's own compiler lowers int8 products to on x86. It takes plain int8 tensors, where
``quantized.linear_dynamic`` needs torch's quantized tensors, whose removal torch 2.14 announces; and it takes one scale
per token, where that has one per batch, so that a sample's result would depend on the others. Its sums are exact only
on processors that add int8 products in 32 bits, so it is tried on numbers that overflow 16 before it is used
(:func:`int8_kernel`). Everywhere else the weights are expanded once, in memory: on a GPU to bfloat16, half of float32's
traffic, where the steps around int8 products would be so many more kernels to launch (not measured, for want of one);
on other processors to float32, which is right and no faster than before.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from jumbo_core.jumbo.stamps import stamp
from jumbo_core.jumbo.token import JumboFFN, refuse_int8

DTYPES = ("int8", "bfloat16")


@torch.compiler.assume_constant_result
def int8_kernel() -> bool:
    """Whether this processor multiplies int8 matrices by :func:`_multiply` without rounding or overflow."""
    return _multiplies_exactly()


@cache
def _multiplies_exactly() -> bool:
    # Kept for good, so it must not depend on the first caller: autocast, fake tensors, transforms and inference mode
    # are a thread's own, and a new thread has none of them.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_try_products).result()


def _try_products() -> bool:
    random = dict(dtype=torch.int8, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    x, weight = torch.randint(-127, 128, (3, 256), **random), torch.randint(-127, 128, (64, 256), **random)
    x[0], weight[0], weight[1] = 127, 127, -127  # pairs of products beyond 16 bits
    scale = torch.ones(len(weight), dtype=torch.float32, device="cpu")
    zero = torch.zeros_like(scale, dtype=torch.int32)
    exact = (x.long() @ weight.long().t()).to(torch.float32)  # below 2^24: float32 holds them
    steps = torch.arange(len(weight), dtype=torch.float32, device="cpu") / len(weight)
    fine, bias = (1 + steps) * 1e-6, 4 * steps - 2
    one_row = F.gelu(exact[:1].double() * fine.double() * 0.5 + bias.double())
    try:
        packed = _pack(weight)
        fused = _multiply(x[:1], packed, fine, zero, bias, 0.5, "gelu").double()
        return all(
            torch.equal(_multiply(x[:rows], packed, scale, zero), exact[:rows]) for rows in (1, 3)
        ) and torch.allclose(fused, one_row, rtol=1e-4, atol=1e-5)
    except (AttributeError, RuntimeError, NotImplementedError):  # a torch without oneDNN has no such operator
        return False


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.onednn.qlinear_prepack(weight, None)


def _multiply(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bias: torch.Tensor | None = None,
    x_scale: float = 1.0,
    activation: str = "none",
) -> torch.Tensor:
    """int8 (B, in) by packed int8 (out, in) -> float32 (B, out), times both scales, plus bias; "gelu" on top of it."""
    return torch.ops.onednn.qlinear_pointwise(
        x, x_scale, 0, packed, scale, zero, bias, 1.0, 0, torch.float32, activation, [], "none"
    )


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (rows, n) -> int8 (rows, n) and one scale a row (rows, 1); a row of zeros stays one."""
    scale = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) * (1 / 127)
    return (x / scale).round_().to(torch.int8), scale


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and one scale per output: rows (B, in) -> (B, out), in the input's dtype.

    With ``int8`` products (see :func:`int8_kernel`) inputs are rounded too, to int8 with one scale per row. Buffers, so
    that a state dict has them and no optimizer does: ``weight`` (out, in) int8, ``scale`` (out,) and ``bias`` (out,).
    A state dict with floating-point weights under the same names is rounded while it is loaded.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, device=None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.ones(out_features, dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, device=device) if bias else None)
        self._ready: tuple | None = None  # the weights as this device multiplies them

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """The same layer in int8."""
        weight, bias = linear.weight, linear.bias
        own = cls(linear.in_features, linear.out_features, bias=bias is not None, device=weight.device)
        with torch.inference_mode(False), torch.no_grad():
            own.weight, scale = quantize_rows(weight.detach().clone().float())
            own.scale = scale[:, 0].clone()
            if bias is not None:
                own.bias = bias.detach().clone().float()
        return own

    def forward(self, x: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
        """(B, in) -> (B, out), through (exact) GELU if asked for."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            y = self._in_graph(x)
            return F.gelu(y) if gelu else y
        kind, weight, scale, bias = self._weights()
        if kind != torch.int8:
            y = F.linear(x.to(kind), weight, bias).to(x.dtype)
        elif len(x) == 1:  # one row, one scale: bias and GELU are the product's own business
            # As few steps as can be: each comes after a product that left nothing but weights in the caches.
            row = x if x.dtype == torch.float32 else x.float()
            size = row.abs().amax().item()
            row_scale = (1e-30 if size < 1e-30 else size) / 127  # NaN stays NaN
            rounded, activation = (row / row_scale).round_().char(), "gelu" if gelu else "none"
            y = _multiply(rounded, weight, scale, self._zero, bias, row_scale, activation)
            return y if x is row else y.to(x.dtype)
        else:
            rounded, row_scale = quantize_rows(x.float())
            y = _multiply(rounded, weight, scale, self._zero)
            y = (y.mul_(row_scale) if bias is None else torch.addcmul(bias, y, row_scale)).to(x.dtype)
        return torch.ops.aten.gelu_(y) if gelu else y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def kind(self) -> torch.dtype:
        """What is multiplied on the device that the weights are on: int8, bfloat16 or float32."""
        if self.weight.device.type == "cpu":
            return torch.int8 if int8_kernel() else torch.float32
        return torch.bfloat16 if self.weight.device.type == "cuda" else torch.float32

    def _expanded(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.weight.float() * self.scale.float()[:, None]).to(dtype)

    def _in_graph(self, x: torch.Tensor) -> torch.Tensor:
        """For compilers and exporters, in operators that they all know: nothing of it is kept between calls."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        # An exported program runs on processors that nobody has tried yet: int8 is how it keeps weights there.
        if torch.compiler.is_exporting() or torch.jit.is_tracing() or self.kind() != torch.int8:
            return F.linear(x, self._expanded(x.dtype), bias)
        rounded, row_scale = quantize_rows(x.float())
        y = torch._int_mm(rounded, self.weight.t()).float() * row_scale * self.scale.float()
        return (y if bias is None else y + bias).to(x.dtype)

    def _weights(self) -> tuple:
        """(what is multiplied, weights, their scales, bias), made once and again when a buffer has changed."""
        own = tuple(self._buffers.values())  # self.weight takes a search through the module
        now = [stamp(tensor) for tensor in own]
        ready = self._ready
        # Their buffers are held with them: a tensor that takes their place cannot take their address as well.
        if ready is None or ready[1] != now or any(a is not b for a, b in zip(ready[0], own, strict=True)):
            with torch.inference_mode(False), torch.no_grad():
                kind = self.kind()
                if kind == torch.int8:
                    self._zero = torch.zeros(self.out_features, dtype=torch.int32, device=self.weight.device)
                    bias = None if self.bias is None else self.bias.float()
                    made = kind, _pack(self.weight), self.scale.float(), bias
                else:
                    bias = None if self.bias is None else self.bias.to(kind)
                    made = kind, self._expanded(kind), None, bias
            self._ready = ready = own, now, made
        return ready[2]

    def _apply(self, *arguments, **options) -> Int8Linear:
        scale, self._ready = self.scale, None
        super()._apply(*arguments, **options)
        if self.scale.dtype != scale.dtype and not scale.is_meta:
            self.scale = scale.to(self.scale.device)  # stays float32: in fp16 small scales lose their digits
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.shape == self.weight.shape:
            rounded, scale = quantize_rows(weight.detach().float())
            state_dict = {**state_dict, f"{prefix}weight": rounded, f"{prefix}scale": scale[:, 0]}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        self._ready = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_ready": None}  # packed weights are this processor's: copies make their own


class LowLatencyFFN(nn.Module):
    """A trained :class:`JumboFFN` for inference: (B, J*D) -> (B, J*D), with the same names of its layers.

    Args:
        ffn: the FFN, which is left as it is.
        dtype: "int8": weights in int8 (:class:`Int8Linear`). "bfloat16": weights and products in bfloat16.

    Raises:
        RuntimeError: when it is called in training mode or asked for gradients.
    """

    def __init__(self, ffn: JumboFFN, dtype: str) -> None:
        super().__init__()
        self.dtype = dtype
        if dtype == "int8":
            self.fc1, self.fc2 = Int8Linear.of(ffn.fc1), Int8Linear.of(ffn.fc2)
        else:
            self.fc1, self.fc2 = _in_bfloat16(ffn.fc1), _in_bfloat16(ffn.fc2)
        self.train(ffn.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, J*D) -> (B, J*D), in the input's dtype."""
        if self.training or (torch.is_grad_enabled() and x.requires_grad) or _has_tangent(x):
            asked = "called in training mode" if self.training else "asked for gradients"
            raise RuntimeError(
                f"a Jumbo FFN in {self.dtype} was {asked}: optimize_for_inference makes models that predict only. Call "
                f"model.eval() and run under torch.inference_mode(); to train, load the weights in a model that was "
                f"not optimised"
            )
        if self.dtype == "int8":
            return self.fc2(self.fc1(x, gelu=True))
        return self.fc2(F.gelu(self.fc1(x.to(self.fc1.weight.dtype)))).to(x.dtype)

    def _load_from_state_dict(self, state_dict, prefix, *others) -> None:
        if self.dtype != "int8":
            refuse_int8(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        return f"dtype={self.dtype!r}"

    def weight_bytes(self) -> int:
        """Bytes of what a call reads: weights, scales and biases as the device multiplies them."""
        layers = (self.fc1, self.fc2)
        if self.dtype != "int8":
            return sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters())
        own = sum(layer.weight.numel() * layer.kind().itemsize for layer in layers)
        return own + sum(b.numel() * b.element_size() for f in layers for n, b in f.named_buffers() if n != "weight")


def _has_tangent(x: torch.Tensor) -> bool:
    """Whether forward-mode autograd follows ``x``."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def _in_bfloat16(linear: nn.Linear) -> nn.Linear:
    """A frozen copy of a linear layer in bfloat16."""
    own = nn.Linear(
        linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta", dtype=torch.bfloat16
    )
    for name, parameter in linear.named_parameters():
        setattr(own, name, nn.Parameter(parameter.detach().to(torch.bfloat16, copy=True), requires_grad=False))
    return own
