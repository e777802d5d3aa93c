"""Inputs of the scan, and the recurrence as a loop over steps that shares no code with the library."""

import math

import torch
from torch.nn import functional as F


def scan_inputs(b, length, heads, channels, states, *, dtype=torch.float64, initial_state=False, skip=True):
    inputs = dict(
        x=torch.randn(b, length, heads, channels, dtype=dtype),
        dt=F.softplus(torch.randn(b, length, heads, dtype=dtype)),
        A=-torch.rand(heads, dtype=dtype) * 4 - 0.1,
        B=torch.randn(b, length, states, dtype=dtype) / math.sqrt(states),
        C=torch.randn(b, length, states, dtype=dtype) / math.sqrt(states),
    )
    if skip:
        inputs["D"] = torch.randn(heads, dtype=dtype)
    if initial_state:
        inputs["initial_state"] = torch.randn(b, heads, channels, states, dtype=dtype)
    return inputs


def loop(x, dt, A, B, C, D=None, initial_state=None):
    """y and the last state, one sample, head and step after the other."""
    b, length, heads, channels = x.shape
    y = torch.full_like(x, math.nan)
    states = torch.zeros(b, heads, channels, B.shape[-1], dtype=x.dtype)
    for i in range(b):
        for k in range(heads):
            h = states[i, k] if initial_state is None else initial_state[i, k].clone()
            for t in range(length):
                h = math.exp(dt[i, t, k] * A[k]) * h + dt[i, t, k] * torch.outer(x[i, t, k], B[i, t])
                y[i, t, k] = h @ C[i, t] + (0 if D is None else D[k] * x[i, t, k])
            states[i, k] = h
    return y, states
