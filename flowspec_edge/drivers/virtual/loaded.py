"""A model with weights, for virtual time: its stages share them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from flowspec_edge.d0.models import DraftModels
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import Shard, load_shard, stage_ranges
from flowspec_edge.util.threads import threads_worth
from flowspec_edge.util.torchdevice import memory_errors


class StageWeights:
    """The target's weights, loaded once for all stages.

    A checkpoint can be split at any layer, a sharded model only where it was sharded.
    """

    def __init__(self, model: OpenModel, dtype: str, device: str = "cpu") -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self._loaded: list[Shard] = []

    def shards(self, stages: int) -> list[Shard]:
        """Return ``stages`` pieces with shared weights; the last may be empty. Raises as ``load_shard``."""
        ranges = stage_ranges(self._model, stages, allow_empty=True)
        if not self._loaded:
            pieces = stages if self._model.sharded else 1
            self._loaded = [load_shard(self._model, i, pieces, self._dtype, self._device)
                            for i in range(pieces)]
        if len(self._loaded) > 1:
            return self._loaded
        return [self._loaded[0].subset(i, stages, layers) for i, layers in enumerate(ranges)]

    def whole(self, stages: int) -> Shard:
        """Return all layers as one stage, for a group of devices that share every layer."""
        pieces = self.shards(stages)
        return replace(pieces[0], stages=1, layers=(0, pieces[-1].layers[1]), norm=pieces[-1].norm,
                       modules=tuple(module for piece in pieces for module in piece.modules))


class LoadedModel:
    """A ``cluster.VirtualModel`` that computes.

    dtype   of D0's weights and the stages'
    device  torch device for all of them
    """

    def __init__(self, model: OpenModel, dtype: str, device: str) -> None:
        self._size, self._device = model.size, device
        with memory_errors(device):
            self.sessions = DraftModels(model, dtype, device)
        self._weights = StageWeights(model, dtype, device)

    def engines(self, stages: int) -> list[StageEngine]:
        return [StageEngine(shard) for shard in self._weights.shards(stages)]

    def whole(self, stages: int) -> StageEngine:
        return StageEngine(self._weights.whole(stages))

    def note(self) -> str:
        return ""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """One thread for small models; out-of-memory errors are of one line."""
        with memory_errors(self._device), threads_worth(self._size):
            yield
