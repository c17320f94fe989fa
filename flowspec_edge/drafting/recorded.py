"""Draft passes as CUDA graphs: one launch where a head makes 33, and a small model some 410.

A stage's graphs are cut at attention, because its caches have no fixed places (``stage.layer_graphs``).  Here that
would leave five launches a layer outside, and D0 waits for them: so caches of drafters have fixed places, and
attention is recorded, too.

Nothing that a pass computes with has another place or shape in the next one: rows are padded to one of a
few numbers, a mask is as wide as one of a few multiples of 256 columns of the shared memory, and the rows of
it that take keys and values are read from a tensor.  What a pass needs is copied to fixed places before.

A pass is three graphs: the model, by width; lm_head; and the order of the children, which a request needs if no noise
takes part in it.  So the logits of all widths have one place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.drafting.tree_cache import CacheMemory
from flowspec_edge.sampling.sampler import likeliest
from flowspec_edge.stage.layers.attention import SharedMask
from flowspec_edge.stage.layers.kv_cache import KVPass
from flowspec_edge.util.graphs import TIMED_TURNS, Clock, KernelChoice, Recorder, choose, load

ROWS = (16, 32)  # of a recorded pass; a request asks for ten nodes, and a few tokens are new
MOST_CHILDREN = 16
WARM_ROWS = 256  # the most that a pass over a shared memory has: longer texts are read in several


@dataclass(frozen=True)
class PassModel:
    """What computes a pass.

    run       (states [n, H] or None, tokens, positions, mask, cache) to outputs [n, H]: tokens are int64 [n],
              or their embeddings [n, H]; positions int64 [n]; mask and cache are as layers of stages take them
    logits    outputs [n, H] to [n, V], or [n, D] over a draft vocabulary
    width     H
    states    whether a pass starts with states
    reach     makes room for positions up to this one
    embed     host's tokens [n] to embeddings [n, H] on the device, if no kernel looks them up
    unfit     why passes cannot be recorded, or ""
    """

    run: Callable[[Tensor | None, Tensor, Tensor, Any, Any], Tensor]
    logits: Callable[[Tensor], Tensor]
    width: int
    states: bool
    reach: Callable[[int], None]
    embed: Callable[[Tensor], Tensor] | None = None
    unfit: str = ""


class PassInputs(NamedTuple):
    """n rows of one or several sessions.

    tokens, positions  n each
    states    together [n, H], or none
    visible   bool [n, m], all of one width
    rows      int64 [n], of the memory
    """

    tokens: list[int]
    positions: list[int]
    states: list[Tensor]
    visible: NDArray[np.bool_]
    rows: NDArray[np.int64]


class _RecordedMask(SharedMask):
    def __init__(self, hidden: Tensor, rows: int) -> None:
        """Take the mask's memory: ``hidden`` [1, 1, groups * rows, m], additive."""
        self._rows, self._hidden = rows, hidden


class PassGraphs:
    """Passes of a number of rows over a shared memory."""

    def __init__(self, model: PassModel, memory: CacheMemory, rows: int, record: Recorder) -> None:
        device, dtype = memory.shape.device, memory.shape.dtype
        self.model, self._memory, self._rows, self._resized = model, memory, rows, memory.resized
        self._visible = torch.zeros(rows * memory.rows, dtype=torch.bool, device=device)
        # Tokens, positions, the memory's rows, whose children are asked for, places of states.
        self._numbers = torch.zeros(5, rows, dtype=torch.int64, device=device)
        self._states, self._embedded, self.outputs = (
            torch.zeros(rows, model.width, dtype=dtype, device=device) for _ in range(3))
        self._visible_bias, self._hidden_bias = (torch.full((), value, dtype=dtype, device=device)
                                                 for value in (0.0, -torch.inf))
        self._passes = {width: record(partial(self._compute, width))[1] for width in memory.widths()}
        self._logits, self._replay_logits = record(self._select_logits)
        self._ranks, self._replay_ranks = record(partial(likeliest, self._logits, MOST_CHILDREN))

    @property
    def hold(self) -> bool:
        """Whether the memory is where it was: it is not if it has grown."""
        return self._memory.resized == self._resized

    def run(self, inputs: PassInputs, ranked_rows: Sequence[int]) -> Tensor:
        """Return outputs [n, H], valid until the next pass.

        ``ranked_rows``: rows whose children :meth:`logits` are for.
        """
        self.load(inputs, ranked_rows)
        self._passes[inputs.visible.shape[1]]()
        return self.outputs[: len(inputs.tokens)]

    def logits(self) -> Tensor:
        """Return logits of the rows asked for, then of padding: [rows, V], valid until the next pass."""
        self._replay_logits()
        return self._logits

    def ranked(self) -> Tensor:
        """Their best children, as ``sampler.likeliest`` gives them, after :meth:`logits`."""
        self._replay_ranks()
        return self._ranks

    def load(self, inputs: PassInputs, ranked_rows: Sequence[int]) -> None:
        """Load a pass' inputs; padding is the first row again, which computes and stores what that does."""
        n, width = inputs.visible.shape
        numbers = np.zeros((5, self._rows), np.int64)
        numbers[:3, :n] = inputs.tokens, inputs.positions, inputs.rows
        numbers[:3, n:] = numbers[:3, :1]
        numbers[3, : len(ranked_rows)] = ranked_rows
        numbers[4, :n] = np.arange(n)
        visible = np.concatenate([inputs.visible, np.repeat(inputs.visible[:1], self._rows - n, 0)])
        load(self._numbers, numbers)
        load(self._visible[: self._rows * width], visible.reshape(-1))
        if inputs.states:
            torch.cat(inputs.states, out=self._states[:n])
        if self.model.embed is not None:
            load(self._embedded[:n], self.model.embed(torch.tensor(inputs.tokens)))

    def _compute(self, width: int) -> None:
        tokens, positions, memory_rows, _, sources = self._numbers
        visible = self._visible[: self._rows * width].view(1, 1, self._rows, width)
        visible = visible.expand(-1, self._memory.shape.kind.groups, -1, -1)
        bias = torch.where(visible, self._visible_bias, self._hidden_bias)
        mask = _RecordedMask(bias.view(1, 1, -1, width), self._rows)
        states = self._states.index_select(0, sources) if self.model.states else None
        if self.model.embed is not None:
            tokens = self._embedded.index_select(0, sources)
        cache = KVPass(self._memory.cache, memory_rows, width)
        self.outputs[:] = self.model.run(states, tokens, positions, mask, cache)

    def _select_logits(self) -> Tensor:
        return self.model.logits(self.outputs.index_select(0, self._numbers[3]))

    def run_unrecorded(self, width: int) -> Tensor:
        """Return what the graphs compute after :meth:`load`, without them."""
        self._compute(width)
        return likeliest(self._select_logits(), MOST_CHILDREN)


RecordedPasses = Mapping[int, PassGraphs]  # by number of rows


def fitting(passes: RecordedPasses, rows: int) -> PassGraphs | None:
    """Return the least of them to which ``rows`` rows can be padded; None: they are not recorded."""
    sizes = [size for size, graphs in passes.items() if size >= rows and graphs.hold]
    return passes[min(sizes)] if sizes else None


@torch.inference_mode()
def warm_up(model: PassModel, memory: CacheMemory) -> None:
    """Run a pass of ``WARM_ROWS`` over the whole memory, so that the allocator holds what later passes need."""
    model.reach(memory.rows - 1)
    n, like = min(WARM_ROWS, memory.rows), memory.layers[0]
    numbers = torch.arange(n, device=like.device)
    states = like.new_zeros(n, model.width) if model.states else None
    tokens = numbers * 0 if model.embed is None else model.embed(torch.zeros(n, dtype=torch.int64))
    mask = memory.shape.mask(np.ones((n, memory.rows), bool))
    model.run(states, tokens, numbers, mask, KVPass(memory.cache, numbers, memory.rows))
    for layer in memory.layers:
        layer.zero_()


@torch.inference_mode()
def record_passes(model: PassModel, memory: CacheMemory, record: Recorder, clock: Clock = time.perf_counter
                  ) -> tuple[RecordedPasses, KernelChoice]:
    """Choose for ``ROWS`` whether passes over an empty memory run as graphs; before the first session.

    Bits are compared at every width, times at the first.
    """
    if model.unfit:
        return {}, KernelChoice(reason=f"draft passes run kernel by kernel: {model.unfit}")
    first, *others = memory.widths()

    def prepare(rows: int, graphs: PassGraphs, recorded: bool, turn: int) -> Callable[[], bytes]:
        width = first if turn < TIMED_TURNS else others[turn - TIMED_TURNS >> 1]
        inputs = _trial(graphs, memory, rows, width, turn)
        for tensor in (graphs.outputs, *(layer[:, width - rows : width] for layer in memory.layers)):
            tensor.zero_()  # else what a pass forgets to write would be there from the one before

        def run() -> bytes:
            if recorded:
                graphs.run(inputs, range(rows))
                graphs.logits()
                return graphs.ranked().cpu().numpy().tobytes()
            graphs.load(inputs, range(rows))
            return graphs.run_unrecorded(width).cpu().numpy().tobytes()

        return run

    passes, choice = choose("draft passes", ROWS, lambda rows: PassGraphs(model, memory, rows, record), prepare, clock,
                            untimed=2 * len(others))
    for layer in memory.layers:
        layer.zero_()
    return passes, choice


def _trial(graphs: PassGraphs, memory: CacheMemory, rows: int, width: int, turn: int) -> PassInputs:
    """Rows that differ from turn to turn, and see all of the width behind a text of zeros."""
    shape = memory.shape
    columns = np.arange(rows) + width - rows
    visible = np.ones((rows, width), bool)
    visible[:, columns] = np.tri(rows, dtype=bool)
    states = (turn + torch.arange(rows * graphs.outputs.shape[1])).view(rows, -1).sin()
    return PassInputs([*range(turn, turn + rows)], columns.tolist(),
                      [states.to(shape.dtype).to(shape.device)] if graphs.model.states else [],
                      visible, columns)
