"""Memory of the device that a stage computes on: is there enough, and what is said where there is not.

Knows how PyTorch fails for want of memory, on CPUs, GPUs and boards whose GPU shares the memory (Jetson).
There nothing may fail at all: Linux grants what it does not have and then kills a process, so what is
available is looked up first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flowspec_edge import procfs
from flowspec_edge.errors import FlowspecError

_MEMINFO = Path("/proc/meminfo")
_LEFT = 128 << 20  # bytes that stay available to the system
# Beside torch.OutOfMemoryError: the CPU's allocator, sizes beyond any memory, cuBLAS, and the CUDA allocator
# on Tegra, which asks NVML for details and fails because NVML does not know the GPU.
_TEXTS = ("can't allocate memory", "Storage size calculation overflowed", "CUBLAS_STATUS_ALLOC_FAILED",
          "NVML_SUCCESS == r INTERNAL ASSERT")


@contextmanager
def claim(what: str, nbytes: int, advice: str, available: int | None = None) -> Iterator[None]:
    """Round an allocation of ``nbytes`` (0: unknown) for ``what``.

    available  bytes, from :func:`available_bytes`; None: not known before it is tried

    FlowspecError, which ends with ``advice``, if they are too few or the allocation fails.
    """
    size = f" ({nbytes / 1e6:.0f} MB)" if nbytes else ""
    if available is not None and nbytes + _LEFT > available:
        raise FlowspecError(f"no memory for {what}{size}: {available / 1e6:.0f} MB are available, of which "
                            f"{_LEFT / 1e6:.0f} are left to the system; {advice}")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise FlowspecError(f"no memory for {what}{size}: {advice}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how PyTorch says that an allocation failed."""
    return (isinstance(error, torch.OutOfMemoryError | MemoryError)
            or any(text in str(error) for text in _TEXTS))


def available_bytes(device: torch.device, meminfo: Path = _MEMINFO) -> int | None:
    """What can still be allocated where the GPU shares the system's memory; None elsewhere."""
    if device.type != "cuda" or not torch.cuda.get_device_properties(device).is_integrated:
        return None
    return procfs.sizes(meminfo).get("MemAvailable")


def release(device: torch.device) -> None:
    """Give memory that tensors no longer use back to the system; on CUDA this waits for the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
