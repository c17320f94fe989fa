"""A stand-in for CUDA graphs on a CPU: repeats the operations that PyTorch dispatched, on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flowspec_edge.stage.layer_graphs import LayerGraphs
from flowspec_edge.stage.preparation import record_layers
from flowspec_edge.stage.shard import Shard

Made = TypeVar("Made")


class Recording(TorchDispatchMode):
    """``calls``: (operation, arguments, result), in order.  Python's numbers stay what they were, as in a
    graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made

    @torch.inference_mode()
    def repeat(self) -> None:
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(made), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor an operation in place
                    old.copy_(new)

    def names(self) -> list[str]:
        return [str(func) for func, *_ in self.calls]


def _tensors(values: Any) -> list[Tensor]:
    found = values if isinstance(values, list | tuple) else [values]
    return [value for value in found if isinstance(value, Tensor)]


def record(work: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
    """A ``util.graphs.Recorder``."""
    with Recording() as recording:
        made = work()
    return made, recording.repeat


@torch.inference_mode()
def recorded(shard: Shard, *rows: int) -> dict[int, LayerGraphs]:
    """A shard's layers, for each number of rows."""
    return {n: record_layers(shard, n, record) for n in rows}
