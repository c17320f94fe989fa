"""Memory of a torch device: how much is available, and one-line errors where it does not suffice.

On Jetson the GPU shares the system's memory and no allocation fails: Linux overcommits and then kills a
process.  So an allocation is compared with the available memory first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flowspec_edge.errors import FlowspecError
from flowspec_edge.util import procfs

_MEMINFO = Path("/proc/meminfo")
# Besides torch.OutOfMemoryError: the CPU's allocator, absurd sizes, cuBLAS, CUDA's own memory (a context,
# page-locked buffers), and on Tegra the driver's own allocator (NvMap) and the CUDA allocator, which asks
# NVML for details and fails because NVML does not know the GPU.
_OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation overflowed",
                  "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory",
                  "NVML_SUCCESS == r INTERNAL ASSERT", "NvMapMemAlloc")
ADVICE = ("use --dtype fp16, a model in 4 bits (flowspec models shard --dtype int4), fewer other programs on "
         "the GPU, or --device cpu")
_RESERVE = 128 << 20  # bytes left to the system


def available_bytes(device: torch.device, meminfo: Path = _MEMINFO) -> int | None:
    """Bytes available where the GPU shares the system's memory (Jetson); None elsewhere."""
    return procfs.sizes(meminfo).get("MemAvailable") if _shares_memory(device) else None


def _shares_memory(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.get_device_properties(device).is_integrated)


def _why_on_a_jetson(meminfo: Path) -> str:
    """What is free beside what is available, and why CUDA may get neither; "" where it has its own memory."""
    if not (torch.cuda.is_available() and _shares_memory(torch.device("cuda"))):
        return ""
    sizes = procfs.sizes(meminfo)
    free, available = (sizes.get(name, 0) / 1e6 for name in ("MemFree", "MemAvailable"))
    return (f" ({free:.0f} MB are free and {available:.0f} MB available, but CUDA may not get what the page "
            "cache holds, and L4T 36.4.7 and newer may refuse a large piece of free memory)")


def is_out_of_memory(error: BaseException) -> bool:
    return (isinstance(error, torch.OutOfMemoryError | MemoryError)
            or any(text in str(error) for text in _OUT_OF_MEMORY))


@contextmanager
def memory_errors(device: str) -> Iterator[None]:
    """Turn out-of-memory errors within the block into a FlowspecError of one line."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).split(". ")[0].splitlines() or ["an allocation failed"])[0]
        raise FlowspecError(f"{device} is out of memory ({reason}){_why_on_a_jetson(_MEMINFO)}: {ADVICE}"
                            ) from error


@contextmanager
def allocation(what: str, nbytes: int, advice: str, available: int | None = None, meminfo: Path = _MEMINFO
               ) -> Iterator[None]:
    """FlowspecError, with ``advice``, if an allocation of ``nbytes`` (0: unknown) does not fit or fails.

    ``available`` comes from ``available_bytes``; None skips the check in advance.
    """
    size = f" ({nbytes / 1e6:.0f} MB)" if nbytes else ""
    if available is not None and nbytes + _RESERVE > available:
        raise FlowspecError(f"no memory for {what}{size}: {available / 1e6:.0f} MB are available, of which "
                            f"{_RESERVE / 1e6:.0f} are left to the system; {advice}")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise FlowspecError(f"no memory for {what}{size}{_why_on_a_jetson(meminfo)}: {advice}") from error


def release(device: torch.device) -> None:
    """Return unused memory to the system; on CUDA this waits for the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
