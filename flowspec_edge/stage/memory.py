"""Memory of the device that a stage computes on: is there enough, and what is said where there is not.

On boards whose GPU shares the memory (Jetson) no allocation may fail at all: Linux grants what it does not
have and then kills a process.  So what is available (``torchdevice.available_bytes``) is looked up first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flowspec_edge.errors import FlowspecError
from flowspec_edge.torchdevice import is_out_of_memory

_LEFT = 128 << 20  # bytes that stay available to the system


@contextmanager
def claim(what: str, nbytes: int, advice: str, available: int | None = None) -> Iterator[None]:
    """Round an allocation of ``nbytes`` (0: unknown) for ``what``.

    available  bytes, from ``torchdevice``; None: not known before it is tried

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


def release(device: torch.device) -> None:
    """Give memory that tensors no longer use back to the system; on CUDA this waits for the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
