"""The layers of a stage as CUDA graphs, cut at attention: one launch where a layer makes ten.

A graph repeats its kernels on the memory that they had when it was recorded.  What changes with the text,
keys, values and their mask, concerns attention alone, which stays outside; what is between the attention of
two layers is one graph: the end of one layer and the beginning of the next.  So graphs depend on the number
of rows, and on no session, place or length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flowspec_edge.stage.layers.attention import BatchCache, BatchMask
from flowspec_edge.stage.layers.fused import FusedLayer
from flowspec_edge.stage.layers.kv_cache import KVCache
from flowspec_edge.util.graphs import Recorder


class LayerGraphs:
    """The layers for ``rows`` rows.

        graphs.load(hidden, rotation)
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
        ends = zip([None, *layers], [*layers, None], strict=True)
        recorded = [record(partial(self._between, *pair)) for pair in ends]
        self._splits = [split for split, _ in recorded]
        self._replays = [replay for _, replay in recorded]

    def _between(self, done: FusedLayer | None, begun: FusedLayer | None) -> Tensor | None:
        if done is not None:
            done.after(self.hidden, self._attended)
        return None if begun is None else begun.before(self.hidden, self._rotation)

    def load(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> None:
        """hidden [rows, width]; ``rotation`` as for ``FusedLayer``."""
        self.hidden.copy_(hidden)
        for own, given in zip(self._rotation, rotation, strict=True):
            own.copy_(given)

    def advance(self, layer: int) -> None:
        self._replays[layer]()

    def attend(self, layer: int, mask: Tensor | BatchMask, cache: KVCache | BatchCache) -> None:
        split = self._splits[layer]
        assert split is not None
        self._attended.copy_(self._layers[layer].attend(split, mask, cache))
