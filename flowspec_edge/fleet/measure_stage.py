"""How long a stage takes for a segment: real workers, real links, real segments.

Runs stages as ``flowspec`` runs them, each a process, V1 of a pipeline, and plays D0 and its
neighbours: a segment goes out, its result comes back.  So everything is in the time that a worker adds
to its layers: it wakes up, decodes, checks, polls the control channel between layers, and encodes.
Does not know what the times are used for (``measure_fit``), nor what the way to the worker and back
takes (``measure_link``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.measure_clock import busy, typical
from flowspec_edge.fleet.measure_worker import MeasuredWorker
from flowspec_edge.fleet.memory import ModelBytes
from flowspec_edge.messages import Credit, Int32, Open, Segment, pack_bits
from flowspec_edge.runtime.workerconfig import Dtype
from flowspec_edge.stage.shard import even_runs, load_config
from flowspec_edge.transport.zmq_links import ZmqTransport

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 512, 1500)
_CHUNK = 64  # prompt tokens a segment
CAPACITY_BEYOND = 3 * max(ROWS) + _CHUNK  # rows that a session holds beside its text
_SWEEPS = 2  # over all row counts, before the context grows
_PAUSE_S = 0.002  # about what D0 takes between an output and the next segment
_SHARE = 0.4  # of the usable memory, for what is measured


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """What was timed: ``rows`` of a segment through ``layers`` layers, over ``context`` cached tokens."""

    layers: int
    rows: int
    context: int


def choose_cuts(model: ModelBytes, usable_mb: float) -> list[int]:
    """Into how many stages to cut the model, so that V1 has two different numbers of layers.

    The larger V1 is half of the model, or as much as fits into a share of the memory beside the
    smaller one, a quarter as long.  There is one number only if nothing but one layer is possible;
    FlowspecError if not even that fits.
    """
    if model.embedding + model.layer > usable_mb * 1e6:
        raise FlowspecError(f"a layer and the embeddings take {(model.embedding + model.layer) / 1e6:.0f} "
                            f"MB, and only {usable_mb:.0f} MB of memory are free: end what else runs here")
    if model.layers <= 2:
        return list(range(1, model.layers + 1))
    longest = {stages: even_runs(model.layers, stages)[0][1] for stages in range(2, model.layers + 1)}
    for stages, large in longest.items():
        small = min(longest, key=lambda s: (abs(longest[s] - max(1, large // 4)), s))
        if 2 * model.embedding + (large + longest[small]) * model.layer <= usable_mb * 1e6 * _SHARE:
            return [stages, small] if large > longest[small] else [stages]
    return [model.layers]


class StageProcess:
    """One worker, V1 of ``stages``; a session of segments that are never committed but for the text."""

    def __init__(self, transport: ZmqTransport, undo: ExitStack, target: Path, stages: int, dtype: Dtype,
                 device: str, threads: int) -> None:
        """Start it; the worker's ``ready`` waits for it.  ``undo`` ends it."""
        self.worker = MeasuredWorker(transport, undo, target, stages, dtype, device, threads)
        self.layers = self.worker.layers
        self._vocabulary = int(load_config(target).vocab_size)
        self._root: int | None = None  # of the newest tree, if nothing came after it
        self._session = self._run = self._next = self._text = 0
        self._uncommitted: Int32 = np.empty(0, np.int32)

    def open(self, capacity: int) -> None:
        """A new session of at most ``capacity`` cached rows."""
        self._session += 1
        self._run = self._next = self._text = 0
        self._uncommitted = np.empty(0, np.int32)
        self._root = None
        self.worker.send(Open(self._session, 0, capacity))

    def read(self, tokens: int) -> None:
        """Cache text until there are ``tokens`` of it."""
        self._root = None
        while self._text < tokens:
            n = min(_CHUNK, tokens - self._text)
            numbers = np.arange(self._next, self._next + n, dtype=np.int32)
            positions = np.arange(self._text, self._text + n, dtype=np.int32)
            self._exchange(numbers, positions, [(2 << i) - 1 for i in range(n)])
            self._uncommitted = numbers
            self._text += n

    def tree(self, rows: int) -> float:
        """Seconds from a segment's start to its result: ``rows`` nodes of a binary tree below the text.

        Of the tree before, the root has become text, as in life: no two segments see equally much,
        and what a library keeps for shapes that it has met does not help.
        """
        if self._root is not None:
            self._uncommitted = np.array([self._root], np.int32)
            self._text += 1
        paths = [1]
        for i in range(1, rows):
            paths.append(1 << i | paths[(i - 1) // 2])
        positions = np.array([self._text + path.bit_count() - 1 for path in paths], dtype=np.int32)
        numbers = np.arange(self._next, self._next + rows, dtype=np.int32)
        self._root = self._next
        return self._exchange(numbers, positions, paths)

    def _exchange(self, numbers: Int32,
                  positions: Int32, bits: list[int]) -> float:
        n = len(numbers)
        tokens = ((numbers * 7919 + 13) % self._vocabulary).astype(np.int32)
        segment = Segment(
            session=self._session, epoch=0, run=self._run, first=self._next, stop=self._next + n,
            numbers=numbers, positions=positions, base=self._next, bits=pack_bits(bits, n),
            committed=self._uncommitted, tokens=tokens)
        self._run += 1
        self._next += n
        self._uncommitted = np.empty(0, np.int32)
        start = time.perf_counter()
        self.worker.send(segment)
        seconds, credit = 0.0, False
        while not (seconds and credit):
            self.worker.wait()
            for answer in self.worker.receive():
                if isinstance(answer, Credit):
                    credit = True
                else:
                    seconds = time.perf_counter() - start
        return seconds


def sample(stages: Sequence[StageProcess], contexts: Sequence[int], seconds: float,
           advance: Callable[[float], None]) -> dict[Case, float]:
    """Typical seconds of every case: from sending a segment to having its result.

    As in life, half of the segments come at once, as to a stage that is busy with the one before,
    and half after a while in which D0 worked: the stage has fallen asleep, and its caches are cold.
    All cases are gone through again and again, the stages in turn, so that whatever disturbs one
    disturbs all; for about ``seconds``, but at least twice after a first time that does not count.
    ``advance`` is told the share of the time that has passed.
    """
    times: dict[Case, list[float]] = {}
    start = time.monotonic()
    rounds = 0
    while rounds < 3 or time.monotonic() - start < seconds:
        for stage in stages:
            stage.open(contexts[-1] + CAPACITY_BEYOND)
        for context in contexts:
            for stage in stages:
                stage.read(context)
            for sweep in range(_SWEEPS):
                for rows in ROWS:
                    for stage in stages:
                        if sweep % 2:
                            busy(_PAUSE_S)
                        took = stage.tree(rows)
                        if rounds:
                            times.setdefault(Case(stage.layers, rows, context), []).append(took)
        rounds += 1
        advance(min(1.0, (time.monotonic() - start) / seconds))
    return {case: typical(taken) for case, taken in times.items()}
