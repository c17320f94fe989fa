"""Conversions between message payloads and torch tensors, without a copy on the CPU; loading without bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.errors import FlowspecError, ProtocolError, UsageError
from flowspec_edge.messages import Payload

MIXED = "mixed"  # float32, and matrices in 16 bits (stage.quant.half)
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, MIXED: torch.float32,
}
_WIRE: dict[str, tuple[torch.dtype, type[np.generic]]] = {
    "float32": (torch.float32, np.float32),
    "float16": (torch.float16, np.float16),
    "bfloat16": (torch.bfloat16, np.uint16),
}
_WIRE_NAMES = {dtype: name for name, (dtype, _) in _WIRE.items()}


def parse_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of activations called "fp32", "fp16", "bf16" or "mixed"; UsageError otherwise."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UsageError(f"no dtype {name!r}: use one of {', '.join(DTYPES)}") from None


def check_finite(values: Tensor, dtype: torch.dtype, source: str) -> None:
    """Raise FlowspecError, which begins with ``source``, if a value is NaN, infinite, or too large for ``dtype``.

    Costs a tenth of a copy. Integers, and floats of 8 bits, pass.
    """
    if not values.numel() or values.dtype not in (*DTYPES.values(), torch.float64):
        return
    least, most = (bound.item() for bound in torch.aminmax(values))
    limit = torch.finfo(dtype).max
    if not (-limit <= least and most <= limit):
        fault = ("NaN" if math.isnan(most) else
                 "infinity" if math.inf in (-least, most) else "too large a value")
        raise FlowspecError(f"{source} holds {fault} for {str(dtype).removeprefix('torch.')}: copy the model "
                            "again, or choose a wider --dtype")


def first_row_not_finite(payload: Payload) -> int | None:
    """Return the first row of [n, H] with a NaN or an infinity; None if there is none.

    Reads host memory only.
    """
    values = to_torch(payload)
    if not values.numel() or all(math.isfinite(bound.item()) for bound in torch.aminmax(values)):
        return None
    return int((~values.isfinite()).any(-1).nonzero()[0])


def wire_name(dtype: torch.dtype) -> str:
    """Return a Payload's name for ``dtype``: "float32", "float16" or "bfloat16"."""
    return _WIRE_NAMES[dtype]


def to_torch(payload: Payload) -> Tensor:
    """Shares the payload's memory, which may be a received frame and must not be written to.

    ProtocolError if the array's dtype is not the one that the payload states.
    """
    try:
        dtype, element = _WIRE[payload.dtype]
    except KeyError:
        raise ProtocolError(f"payload of unknown dtype {payload.dtype!r}") from None
    if payload.array.dtype != element:
        raise ProtocolError(f"payload says {payload.dtype} but holds {payload.array.dtype}")
    return torch.from_numpy(_writable(payload.array)).view(dtype)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device; copies from the CPU to CUDA are enqueued through pinned memory.

    ``tensor`` may be changed at once.
    """
    if tensor.device == device or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy to host memory; copies from CUDA are enqueued, and valid when the device has reached them."""
    return [tensor if tensor.device.type != "cuda" else
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors]


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, once the device has reached it; the host's thread does not sleep meanwhile."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    [copied] = to_host([tensor])
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    event.synchronize()
    return copied


def indices(values: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer], device: torch.device
            ) -> Tensor:
    """Return ``values`` as int64, without waiting for the device's queue."""
    return to_device(torch.from_numpy(np.asarray(values, np.int64)), device)


def from_torch(tensor: Tensor) -> Payload:
    """Return a payload of a float32, float16 or bfloat16 tensor; shares the memory of a contiguous CPU tensor."""
    name = wire_name(tensor.dtype)
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return Payload(name, tensor.numpy())


class _Unlocked:
    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array  # keeps the memory alive
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """Avoids torch's warning about read-only memory."""
    return array if array.flags.writeable else np.asarray(_Unlocked(array))


@contextmanager
def no_loading_bars() -> Iterator[None]:
    """Hide transformers' progress bars within the block: a file that is mapped loads at once."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
