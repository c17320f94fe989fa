"""The layers of a stage as CUDA graphs, cut at attention: one launch where a layer makes ten.

A graph repeats its kernels on the memory that they had when it was recorded.  What changes with the text,
keys, values and their mask, concerns attention alone, which stays outside; what is between the attention of
two layers is one graph: the end of one layer and the beginning of the next.  So graphs depend on the number
of rows, and on no session, place or length.  Experts run between two graphs: which of them is known only
when the router has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from flowspec_edge.stage.layers.attention import BatchCache, BatchMask
from flowspec_edge.stage.layers.fused import FusedLayer, Routed
from flowspec_edge.stage.layers.kv_cache import KVCache
from flowspec_edge.util.graphs import Recorder, Replay


class LayerGraphs:
    """The layers for ``rows`` rows.

        graphs.load(hidden, rotation, new)
        for i in range(layers):
            graphs.advance(i)             # the end of layer i - 1, the beginning of layer i
            graphs.attend(i, mask, cache)
        graphs.advance(layers)
        graphs.hidden
    """

    def __init__(self, layers: Sequence[FusedLayer], rows: int, width: int, rotated: int, attended: int,
                 dtype: torch.dtype, device: torch.device, record: Recorder) -> None:
        """width     of the hidden states
        rotated   head_dim
        attended  heads * head_dim
        """
        new = partial(torch.zeros, dtype=dtype, device=device)
        self.hidden = new(rows, width)  # of the layer that ``advance`` has begun, or of the last one's output
        self._attended = new(rows, attended)
        self._rotation = new(rows, 1, rotated), new(rows, 1, rotated)
        self._layers = layers
        self._splits: list[Tensor | None] = []
        ends = zip([None, *layers], [*layers, None], strict=True)
        self._steps = [self._between(*pair, record) for pair in ends]

    def _between(self, done: FusedLayer | None, begun: FusedLayer | None, record: Recorder) -> list[Replay]:
        """What runs between the attention of two layers; adds to ``_splits``."""
        def ends() -> Routed | None:
            return None if done is None else done.after(self.hidden, self._attended)

        def begins() -> Tensor | None:
            return None if begun is None else begun.before(self.hidden, self._rotation)

        if done is None or not done.sparse:
            (_, split), replay = record(lambda: (ends(), begins()))
            self._splits.append(split)
            return [replay]
        routed, first = record(ends)

        def mixes() -> None:
            done.mix(self.hidden, cast(Routed, routed), self._new)

        if begun is None:
            return [first, mixes]
        split, second = record(begins)
        self._splits.append(split)
        return [first, mixes, second]

    def load(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], new: int) -> None:
        """hidden [rows, width], of which ``new`` are no padding; ``rotation`` as for ``FusedLayer``."""
        self._new = new
        self.hidden.copy_(hidden)
        for own, given in zip(self._rotation, rotation, strict=True):
            own.copy_(given)

    def advance(self, layer: int) -> None:
        for step in self._steps[layer]:
            step()

    def attend(self, layer: int, mask: Tensor | BatchMask, cache: KVCache | BatchCache) -> None:
        split = self._splits[layer]
        assert split is not None
        self._attended.copy_(self._layers[layer].attend(split, mask, cache))
