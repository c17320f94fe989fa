"""One pass of a shard's layers over the rows of a segment, or of a batch of segments.

CUDA launches are asynchronous.  Copies go through pinned memory, so that they do not block either, and a
LaunchPacer keeps the host at most ``AHEAD`` layers ahead of the device, so that polls happen in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.model.experts import touched
from flowspec_edge.stage.families.decoder import DecoderLayer
from flowspec_edge.stage.families.rotary import Rotary
from flowspec_edge.stage.layer_graphs import LayerGraphs
from flowspec_edge.stage.layers.stage_cache import CacheKind, Part
from flowspec_edge.stage.quant.grouped import expanding
from flowspec_edge.util.tensors import indices, to_device, to_host, to_torch
from flowspec_edge.util.weight_file import tokens_device

AHEAD = 2  # pending layers: the running one, and the next so that the device does not idle
Taps = list[tuple[int, Tensor]]  # layers passed, hidden states [n, H]


class Modules(Protocol):
    """What a pass needs of a ``shard.Shard``."""

    @property
    def layers(self) -> tuple[int, int]: ...
    @property
    def modules(self) -> tuple[DecoderLayer, ...]: ...
    @property
    def rotary(self) -> Rotary: ...
    @property
    def embed(self) -> Any: ...
    @property
    def embed_scale(self) -> float: ...
    @property
    def norm(self) -> Any: ...
    @property
    def turns(self) -> Sequence[str]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def row_step(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def layers_of_kinds(self) -> Mapping[CacheKind, Sequence[int]]: ...
    @property
    def kind_indexes(self) -> Sequence[int]: ...


@torch.inference_mode()
def run(shard: Modules, parts: Sequence[Part], keep_going: Callable[[], bool],
        graphs: Mapping[int, LayerGraphs] = MappingProxyType({})) -> list[tuple[Taps, Tensor]] | None:
    """(taps, output [n, H]) of each part in host memory; None as soon as ``keep_going`` returns False.

    parts       at least one, each with rows
    keep_going  called before each layer and while the last layers are pending; it marks ended parts, whose
                results are undefined, and returns False when all have ended
    graphs      the layers recorded, by number of rows; the others run one by one

    Writes keys and values behind each cache's last slot; the caller appends them.
    """
    first, last = shard.layers
    tap_layers = {layer for part in parts for layer in part.segment.taps}
    taps: Taps = []

    def tap(layer: int, inputs: Tensor) -> None:
        # The previous stage taps the states that it sends; of the inputs, only embeddings are computed here.
        if layer in tap_layers and (layer > first or shard.embed is not None):
            taps.append((layer, inputs.clone()))  # layers write to their inputs

    pacer = LaunchPacer.for_device(shard.device)
    with expanding(len(parts) == 1 and parts[0].segment.text):
        hidden = _layers(shard, parts, tap, keep_going, pacer, graphs)
    if hidden is None:
        return None
    # A stage without layers computes nothing, except the embeddings on the first stage.
    if last in tap_layers and (last > first or shard.embed is not None):
        taps.append((last, hidden))
    normed = hidden if shard.norm is None else shard.norm(hidden)
    hidden, *tapped = to_host([normed, *(states for _, states in taps)])
    pacer.enqueued()
    if not pacer.finish(keep_going):
        return None
    results, start = [], 0
    for part in parts:
        stop = start + len(part)
        part.experts = touched(shard.modules, start, stop)
        results.append(([(layer, states[start:stop]) for (layer, _), states in zip(taps, tapped, strict=True)
                         if layer in part.segment.taps], hidden[start:stop]))
        start = stop
    return results


def _inputs(shard: Modules, parts: Sequence[Part]) -> Tensor:
    if shard.embed is None:
        states = [to_torch(part.segment.hidden) for part in parts if part.segment.hidden is not None]
        return to_device(torch.cat(states) if len(states) > 1 else states[0], shard.device)
    tokens = [part.segment.tokens for part in parts if part.segment.tokens is not None]
    embedded: Tensor = shard.embed(indices(np.concatenate(tokens), tokens_device(shard.embed, shard.device)))
    return embedded if shard.embed_scale == 1.0 else embedded * shard.embed_scale


def _layers(shard: Modules, parts: Sequence[Part], tap: Callable[[int, Tensor], None],
            keep_going: Callable[[], bool], pacer: LaunchPacer, graphs: Mapping[int, LayerGraphs]
            ) -> Tensor | None:
    """Hidden states [n, H] of all parts' rows; ``tap`` gets each layer's index and inputs."""
    states, positions = _inputs(shard, parts), np.concatenate([part.segment.positions for part in parts])
    n = len(positions)
    rows = n + -n % shard.row_step
    hidden = states.new_zeros(rows, states.shape[-1])  # layers write to it; ``states`` may be a received message's
    hidden[:n] = states
    ids = to_device(torch.from_numpy(np.pad(positions.astype(np.int64), (0, rows - n))), shard.device)
    inputs = [kind.inputs(parts, index, shard.dtype, shard.device, shard.row_step)
              for index, kind in enumerate(shard.layers_of_kinds)]
    rotations = {turn: shard.rotary(ids, turn, shard.dtype) for turn in dict.fromkeys(shard.turns)}
    if (recorded := graphs.get(rows)) is not None:
        recorded.load(hidden, rotations, n)
        hidden = recorded.hidden
    for i, layer in enumerate(shard.modules):
        if recorded is not None:
            recorded.advance(i)
        tap(shard.layers[0] + i, hidden[:n])
        if not keep_going():
            return None
        cache, mask = inputs[shard.kind_indexes[i]]
        if recorded is not None:
            recorded.attend(i, mask, cache)
        else:
            layer(hidden, rotations[shard.turns[i]], mask, cache, n)
        pacer.enqueued()
    if recorded is not None:
        recorded.advance(len(shard.modules))
        hidden = hidden.clone()  # the next pass writes to the graphs' memory
    return hidden[:n]


class Event(Protocol):
    def synchronize(self) -> None: ...


class LaunchPacer:
    """For one pass: call ``enqueued`` after each layer and after the last copy, then ``finish``."""

    def __init__(self, record: Callable[[], Event] | None) -> None:
        """Set up a clock; ``record`` enqueues an event; None on devices whose calls return when the work is done."""
        self._record = record
        self._events: deque[Event] = deque()

    @classmethod
    def for_device(cls, device: torch.device) -> LaunchPacer:
        return cls(partial(_record, device) if device.type == "cuda" else None)

    def enqueued(self) -> None:
        """Count a step; blocks while more than ``AHEAD`` steps are pending."""
        if self._record is not None:
            self._events.append(self._record())
            while len(self._events) > AHEAD:
                self._events.popleft().synchronize()

    def finish(self, keep_going: Callable[[], bool]) -> bool:
        """Wait for the pending steps; stops with False as soon as ``keep_going`` returns False."""
        while self._events:
            self._events.popleft().synchronize()
            if not keep_going():
                return False
        return True


def _record(device: torch.device) -> Event:
    event = torch.cuda.Event(blocking=True)  # the waiting thread sleeps instead of spinning
    event.record(torch.cuda.current_stream(device))
    return event
