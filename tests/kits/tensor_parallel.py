"""Tensor-parallel ranks for tests: a thread each, connected by a real gloo group over loopback."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from flowspec_edge.messages import Open, Output, Segment
from flowspec_edge.stage.tensor_parallel.engine import TensorEngine
from flowspec_edge.stage.tensor_parallel.layout import TensorKind
from flowspec_edge.stage.tensor_parallel.process_group import GlooGroup
from flowspec_edge.stage.tensor_parallel.shard import load_tensor_shard

KINDS: tuple[TensorKind, ...] = ("megatron", "galaxy")
T = TypeVar("T")


def groups(size: int, directory: Path, timeout: float = 60.0) -> list[GlooGroup]:
    """All ranks of one group, which meet in ``directory``."""
    return [GlooGroup(rank, size, f"file://{directory}/group", "lo", timeout) for rank in range(size)]


def together(calls: list[Callable[[], T]]) -> list[T]:
    """All results; each call in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


class Ranks:
    """Ranks of one model in session 1, epoch 0, that are given every segment at the same time."""

    def __init__(self, path: Path, kind: TensorKind, size: int, directory: Path, dtype: str = "fp32") -> None:
        self.engines = [TensorEngine(load_tensor_shard(path, kind, group, dtype), group)
                        for group in groups(size, directory)]
        for engine in self.engines:
            engine.open(Open(session=1, epoch=0, capacity=128))

    def through(self, segment: Segment) -> Output:
        """The last rank's output; every rank must have computed the very same."""

        def compute(engine: TensorEngine) -> Output:
            admitted = engine.admit(segment)
            assert admitted is not None
            taps, output, *_ = engine.compute([admitted])[0]
            assert not taps
            assert isinstance(output, Output)
            return output

        outputs = together([lambda engine=engine: compute(engine) for engine in self.engines])
        for output in outputs:
            assert output.numbers.tolist() == segment.numbers.tolist()
            assert np.array_equal(output.hidden.array, outputs[-1].hidden.array)
        return outputs[-1]
