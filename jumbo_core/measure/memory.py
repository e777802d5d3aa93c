"""Peak memory of a call: on the CPU in a process of its own, on CUDA by torch's own count."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch


def peak_memory(prepare: Callable[..., Callable[[], object]], *arguments, threads: int) -> float:
    """MiB that a process grows by at most during a call.

    Args:
        prepare: importable function; ``prepare(*arguments)`` makes the call in the new process, everything it needs
            included, and may run a small one to have libraries load their workspaces.
        *arguments: picklable.
        threads: torch threads of the process.

    Raises:
        OSError: the system does not let a process reset its own peak (Linux does, /proc/self/clear_refs).
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure, prepare, arguments, threads).result()


def peak_memory_cuda(call: Callable[[], object]) -> float:
    """MiB of device memory that torch allocates at most during a call, beyond what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _measure(prepare: Callable[..., Callable[[], object]], arguments: tuple, threads: int) -> float:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        call = prepare(*arguments)
        _return_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is in use now
        before = _high_water_mark()
        call()
        return (_high_water_mark() - before) / 1024


def _return_freed_memory() -> None:
    """What was used and freed before goes back to the system: a call that takes it again would seem to take nothing."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other allocators have no such heap
    if trim is not None:
        trim(0)


def _high_water_mark() -> int:
    """Most memory this process has had resident, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
