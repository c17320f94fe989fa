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
# page-locked buffers), and the CUDA allocator on Tegra, which asks NVML for details and fails because NVML
# does not know the GPU.
_OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation overflowed",
                  "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory",
                  "NVML_SUCCESS == r INTERNAL ASSERT")
ADVICE = ("use --dtype fp16, a model in 4 bits (flowspec models shard --dtype int4), fewer other programs on "
         "the GPU, or --device cpu")
_RESERVE = 128 << 20  # bytes left to the system


def available_bytes(device: torch.device, meminfo: Path = _MEMINFO) -> int | None:
    """Bytes available where the GPU shares the system's memory (Jetson); None elsewhere."""
    if device.type != "cuda" or not torch.cuda.get_device_properties(device).is_integrated:
        return None
    return procfs.sizes(meminfo).get("MemAvailable")


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
        raise FlowspecError(f"{device} is out of memory ({reason}): {ADVICE}") from error


@contextmanager
def allocation(what: str, nbytes: int, advice: str, available: int | None = None) -> Iterator[None]:
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
        raise FlowspecError(f"no memory for {what}{size}: {advice}") from error


def release(device: torch.device) -> None:
    """Return unused memory to the system; on CUDA this waits for the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
