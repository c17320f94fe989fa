"""The layers of a stage as CUDA graphs, cut at attention: one launch where a layer makes ten.

A graph repeats its kernels on the memory that they had when it was recorded.  What changes with the text,
keys, values and their mask, or a recurrent layer's states, concerns attention alone, which stays outside; what is
between the attention of two layers is one graph: the end of one layer and the beginning of the next.  So graphs
depend on the number of rows, and on no session, place or length.  Experts run between two graphs: which of them is
known only when the router has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from flowspec_edge.stage.families.decoder import Begun, DecoderLayer
from flowspec_edge.stage.families.feed_forward import Routed
from flowspec_edge.stage.families.rotary import Rotation
from flowspec_edge.util.graphs import Recorder, Replay, load


class LayerGraphs:
    """The layers for a number of rows.

        graphs.load(hidden, rotations, new)
        for i in range(layers):
            graphs.advance(i)             # the end of layer i - 1, the beginning of layer i
            graphs.attend(i, mask, cache)
        graphs.advance(layers)
        graphs.hidden
    """

    def __init__(self, layers: Sequence[DecoderLayer], turns: Sequence[str], hidden: Tensor,
                 rotations: Mapping[str, Rotation], record: Recorder) -> None:
        """Record a pass of the layers.

        turns      by layer, the rotation that it takes
        hidden     [rows, width], like those that will be loaded
        rotations  like those that will be loaded
        """
        self.hidden = hidden.clone()  # the input of the layer that ``advance`` has begun; at the end, the output
        self._rotations = {turn: Rotation(cos.clone(), sin.clone(), None if scale is None else scale.clone())
                           for turn, (cos, sin, scale) in rotations.items()}
        self._layers, self._turns = layers, turns
        rooms: dict[tuple[torch.Size, torch.dtype], Tensor] = {}  # of layers that do not run at once
        self._attended = [rooms.setdefault((room.shape, room.dtype), room)
                          for room in (layer.room(len(hidden), self.hidden) for layer in layers)]
        self._begun: list[Begun] = []
        self._new = len(hidden)
        self._steps = [self._between(index, record) for index in range(len(layers) + 1)]

    def _between(self, index: int, record: Recorder) -> list[Replay]:
        """Return what runs between the attention of layers ``index`` - 1 and ``index``; adds to ``_begun``."""
        last_layer = self._layers[index - 1] if index else None
        last = index == len(self._layers)

        def ends() -> Routed | None:
            if last_layer is None:
                return None
            return last_layer.after(self.hidden, self._begun[index - 1], self._attended[index - 1])

        def begins() -> Begun | None:
            return None if last else self._layers[index].before(self.hidden, self._rotations[self._turns[index]])

        if last_layer is None or last_layer.experts is None:
            (_, begun), replay = record(lambda: (ends(), begins()))
            self._keep(begun)
            return [replay]
        routed, first = record(ends)
        mixes = partial(self._mix, last_layer, cast(Routed, routed))
        if last:
            return [first, mixes]
        begun, second = record(begins)
        self._keep(begun)
        return [first, mixes, second]

    def _keep(self, begun: Begun | None) -> None:
        if begun is not None:
            self._begun.append(begun)

    def _mix(self, layer: DecoderLayer, routed: Routed) -> None:
        layer.mix(self.hidden, routed, self._new)

    def load(self, hidden: Tensor, rotations: Mapping[str, Rotation], new: int) -> None:
        """Load a pass' inputs: ``hidden`` [rows, width], of which ``new`` are no padding."""
        self._new = new
        load(self.hidden, hidden)
        for turn, rotation in rotations.items():
            for target, source in zip(self._rotations[turn], rotation, strict=True):
                if target is not None and source is not None:
                    load(target, source)

    def advance(self, layer: int) -> None:
        for step in self._steps[layer]:
            step()

    def attend(self, layer: int, mask: Any, cache: Any) -> None:
        """Run a layer's attention, between two graphs; ``mask`` and ``cache`` of ``CacheKind.inputs``."""
        self._attended[layer].copy_(self._layers[layer].attend(self._begun[layer], mask, cache, self._new))
