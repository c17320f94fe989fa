"""Draft passes as CUDA graphs: one launch where a head makes 33, and a small model some 410.

A stage's graphs are cut at attention, because its caches have no fixed places (``stage.layer_graphs``).  Here that
would leave five launches a layer outside, and D0 waits for them: so caches of drafters have fixed places, and
attention is recorded, too.

Nothing that a pass computes with has another place or shape in the next one: rows are padded to one of a
few numbers, a mask is as wide as one of a few multiples of 256 columns of the shared memory, and the rows of
it that take keys and values are read from a tensor.  What a pass needs is copied to fixed places before.

A pass is three graphs: the model, by number of rows and width; lm_head; and the order of the children, which
a request needs if no noise takes part in it.  So the logits of all widths have one place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.drafting.tree_cache import CacheMemory
from flowspec_edge.errors import first_line
from flowspec_edge.sampling.sampler import likeliest
from flowspec_edge.stage.layers.attention import SharedMask
from flowspec_edge.stage.layers.kv_cache import KVPass
from flowspec_edge.util.graphs import Clock, KernelChoice, Recorder, Replay, compare

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
        """``hidden`` [1, 1, groups * rows, m], additive."""
        self._rows, self._hidden = rows, hidden


class RecordedPasses:
    """Passes over a shared memory, for those of ``ROWS`` in ``sizes``."""

    def __init__(self, model: PassModel, memory: CacheMemory) -> None:
        device, dtype = memory.shape.device, memory.shape.dtype
        self.sizes: set[int] = set()
        self.model, self._memory, self._recorded_rows = model, memory, memory.rows
        most = max(ROWS)
        self._seen = torch.zeros(most * memory.rows, dtype=torch.bool, device=device)
        # Tokens, positions, the memory's rows, whose children are asked for, places of states.
        self._numbers = {n: torch.zeros(5, n, dtype=torch.int64, device=device) for n in ROWS}
        self._states, self._embedded, self.outputs = (
            torch.zeros(most, model.width, dtype=dtype, device=device) for _ in range(3))
        self._seen_as, self._unseen_as = (torch.full((), value, dtype=dtype, device=device)
                                          for value in (0.0, -torch.inf))
        self._passes: dict[tuple[int, int], Replay] = {}
        self._logits: dict[int, tuple[Tensor, Replay]] = {}
        self._ranks: dict[int, tuple[Tensor, Replay]] = {}

    def record(self, rows: int, record: Recorder) -> None:
        for width in self._memory.widths():
            _, self._passes[rows, width] = record(partial(self._compute, rows, width))
        logits, _ = self._logits[rows] = record(partial(self._asked_logits, rows))
        self._ranks[rows] = record(partial(likeliest, logits, MOST_CHILDREN))

    def size(self, rows: int) -> int:
        """The number of rows to which a pass is padded; 0 if it is not recorded."""
        fitting = [size for size in self.sizes if size >= rows]
        # A memory that has grown is not the recorded one.
        return min(fitting) if fitting and self._memory.rows == self._recorded_rows else 0

    def run(self, size: int, inputs: PassInputs, asked: Sequence[int]) -> Tensor:
        """Outputs [n, H], until the next pass; ``asked``: rows whose children :meth:`logits` are for."""
        self.load(size, inputs, asked)
        self._passes[size, inputs.visible.shape[1]]()
        return self.outputs[: len(inputs.tokens)]

    def logits(self, size: int) -> Tensor:
        """Of the rows asked for, then of padding: [size, V], until the next pass."""
        logits, replay = self._logits[size]
        replay()
        return logits

    def ranked(self, size: int) -> Tensor:
        """Their best children, as ``sampler.likeliest`` gives them, after :meth:`logits`."""
        ranks, replay = self._ranks[size]
        replay()
        return ranks

    def load(self, size: int, inputs: PassInputs, asked: Sequence[int]) -> None:
        """Padding is the first row again, which computes and stores what that does."""
        n, width = inputs.visible.shape
        numbers = np.zeros((5, size), np.int64)
        numbers[:3, :n] = inputs.tokens, inputs.positions, inputs.rows
        numbers[:3, n:] = numbers[:3, :1]
        numbers[3, : len(asked)] = asked
        numbers[4, :n] = np.arange(n)
        seen = np.concatenate([inputs.visible, np.repeat(inputs.visible[:1], size - n, 0)])
        _upload(self._numbers[size], numbers)
        _upload(self._seen[: size * width], seen.reshape(-1))
        if inputs.states:
            torch.cat(inputs.states, out=self._states[:n])
        if self.model.embed is not None:
            self._embedded[:n].copy_(self.model.embed(torch.tensor(inputs.tokens)))

    def _compute(self, rows: int, width: int) -> None:
        tokens, positions, places, _, own = self._numbers[rows]
        seen = self._seen[: rows * width].view(1, 1, rows, width).expand(-1, self._memory.shape.kind.groups, -1, -1)
        mask = _RecordedMask(torch.where(seen, self._seen_as, self._unseen_as).view(1, 1, -1, width), rows)
        states = self._states.index_select(0, own) if self.model.states else None
        if self.model.embed is not None:
            tokens = self._embedded.index_select(0, own)
        cache = KVPass(self._memory.cache, places, width)
        self.outputs[:rows] = self.model.run(states, tokens, positions, mask, cache)

    def _asked_logits(self, rows: int) -> Tensor:
        return self.model.logits(self.outputs.index_select(0, self._numbers[rows][3]))

    def one_by_one(self, rows: int, width: int) -> Tensor:
        """What the graphs compute after :meth:`load`, without them."""
        self._compute(rows, width)
        return likeliest(self._asked_logits(rows), MOST_CHILDREN)


def _upload(target: Tensor, values: NDArray[np.generic]) -> None:
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.device.type == "cuda" else source, non_blocking=True)


@torch.inference_mode()
def warm_up(model: PassModel, memory: CacheMemory) -> None:
    """A pass of ``WARM_ROWS`` over the whole memory, so that the allocator holds what later passes need."""
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
                  ) -> tuple[RecordedPasses | None, KernelChoice]:
    """Record passes over an empty memory, and keep what computes the same bits in no more time.

    Before the first session.  Any failure leaves passes as they are.
    """
    choice = KernelChoice()
    if model.unfit:
        choice.reason = f"draft passes run kernel by kernel: {model.unfit}"
        return None, choice
    passes: RecordedPasses | None = None
    try:
        passes = RecordedPasses(model, memory)
        for rows in ROWS:
            passes.record(rows, record)
            _compare(passes, memory, rows, choice, clock)
    except Exception as error:  # of PyTorch, the driver, a kernel: passes run without graphs as well
        passes = None
        choice = KernelChoice(
            reason=f"draft passes run kernel by kernel: they cannot be recorded: {first_line(error)}")
    for layer in memory.layers:
        layer.zero_()
    return passes if passes and passes.sizes else None, choice


def _compare(passes: RecordedPasses, memory: CacheMemory, rows: int, choice: KernelChoice, clock: Clock
             ) -> None:
    """At every width the results, at the first the times."""
    widths = memory.widths()

    def prepare(width: int, recorded: bool, turn: int) -> Callable[[], bytes]:
        inputs = _trial(passes, memory, rows, width, turn)
        for held in (passes.outputs, *(layer[:, width - rows : width] for layer in memory.layers)):
            held.zero_()  # else what a pass forgets to write would be there from the one before
        def run() -> bytes:
            if recorded:
                passes.run(rows, inputs, range(rows))
                passes.logits(rows)
                return passes.ranked(rows).cpu().numpy().tobytes()
            passes.load(rows, inputs, range(rows))
            return passes.one_by_one(rows, width).cpu().numpy().tobytes()

        return run

    times, why = compare(partial(prepare, widths[0]), clock)
    for turn, width in product(range(2), widths[1:]):
        if not why and len({prepare(width, recorded, turn)() for recorded in (False, True)}) > 1:
            why = "compute other results"
    if why:
        choice.reason = f"passes of {rows} rows run kernel by kernel: recorded passes {why}"
    else:
        passes.sizes.add(rows)
        choice.ms[rows] = times


def _trial(passes: RecordedPasses, memory: CacheMemory, rows: int, width: int, turn: int) -> PassInputs:
    """Rows that differ from turn to turn, and see all of the width behind a text of zeros."""
    shape = memory.shape
    own = np.arange(rows) + width - rows
    visible = np.ones((rows, width), bool)
    visible[:, own] = np.tri(rows, dtype=bool)
    states = (turn + torch.arange(rows * passes.outputs.shape[1])).view(rows, -1).sin()
    return PassInputs([*range(turn, turn + rows)], own.tolist(),
                      [states.to(shape.dtype).to(shape.device)] if passes.model.states else [],
                      visible, own)
