"""Which board is D0, which are stages, in which order, and how many layers each: the best split.

Pure arithmetic over profiles and sizes.  Knows memory, stage times and ports.  Does not know how
a profile came about, nor what a strategy makes of the pipeline (``estimate``).

What is the best, in this order:
1. the slowest stage: its compute for a segment, or its port's time for the segment's hidden states
   where that is longer, since a segment can leave the pipeline no more often than that;
2. the way of one segment: all stages and hops, and lm_head on D0;
3. fewer boards.
Memory is a limit, never traded.  Times count in whole nanoseconds, so that ties are ties.

Exact over every choice of D0, of stages, of V1, of order and of layers, with these readings:
- a hop takes as long as the slower of its two ports would; from D0 to V1 travel token ids, which
  weigh nothing.  (Where one port is slower and the other later, a real hop takes the worse of both
  and is a little longer.)
- any stage may turn out to be the last one, so each is charged for the final norm (some KB).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.config import Memory, Profile
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet.memory import ModelBytes

Role = Literal["auto", "draft", "verify"]
Int64 = NDArray[np.int64]

_NS = 1e9
_LONGEST = 1e4  # seconds; beyond it a time is as bad as this, and sums stay within 64 bits
_COUNT = 4096  # a cost is nanoseconds × _COUNT + boards, so that time decides, then their number
_NEVER = np.int64(2**61)


@dataclass(frozen=True)
class Board:
    """One device, its profile scaled to the model that is planned.

    role  "draft": it is D0; "verify": a stage or nothing; "auto": whatever is best
    """

    name: str
    profile: Profile
    role: Role = "auto"

    @property
    def memory(self) -> Memory:
        """UsageError for a profile without it."""
        if self.profile.memory is None:
            raise UsageError(f"profile {self.profile.name} has no [memory]: a plan needs total_mb, usable_mb "
                             "and process_mb; measure the board with: flowspec device profile")
        return self.profile.memory

    @property
    def room(self) -> int:
        """Bytes for weights and caches."""
        return round((self.memory.usable_mb - self.memory.process_mb) * 1e6)


@dataclass(frozen=True)
class Problem:
    """What is to be split.

    context     tokens of the text, prompt and answer
    tentative   cache rows beside them, for drafts of all requests (``runtime.coordinator.cache_rows``)
    rows        of the segment whose time counts
    """

    size: ModelBytes
    context: int
    tentative: int
    rows: int = 16

    @property
    def cached(self) -> int:
        """Rows that every cache holds."""
        return self.context + self.tentative

    @property
    def layer(self) -> int:
        """Bytes of one layer with its cache."""
        return self.size.layer + self.cached * self.size.kv_row

    def stage(self, layers: int, first: bool) -> int:
        """Bytes of a stage: layers, their cache, the final norm, and V1's embeddings."""
        return layers * self.layer + self.size.norm + first * self.size.embedding

    @property
    def d0(self) -> int:
        """Bytes of D0: lm_head, the draft head and its cache."""
        return self.size.d0_weights + self.cached * self.size.draft_kv_row

    def layers_within(self, board: Board, first: bool) -> int:
        """How many layers the board's memory holds."""
        left = board.room - self.stage(0, first)
        return min(max(left, 0) // self.layer, self.size.layers)


@dataclass(frozen=True)
class Stage:
    """A board that is one: Vi for the i-th, with layers [lo, hi)."""

    board: Board
    layers: tuple[int, int]
    seconds: float  # compute for a segment, at the planned context


@dataclass(frozen=True)
class Plan:
    """The best split."""

    problem: Problem
    d0: Board
    stages: tuple[Stage, ...]
    left_out: tuple[tuple[Board, str], ...]  # and why
    slowest: float  # seconds: objective 1
    way: float  # seconds: objective 2

    @property
    def link_bound(self) -> bool:
        """Whether the slowest of all is a port, not a stage's compute."""
        return self.slowest > max(stage.seconds for stage in self.stages) + 1 / _NS


class DoesNotFit(FlowspecError):
    """No split lets every board keep within its memory."""

    exit_code = 2


def plan(boards: Sequence[Board], problem: Problem) -> Plan:
    """The best split of ``problem`` over ``boards``, in the order of the module's objectives.

    Raises :class:`DoesNotFit` when there is none, UsageError for fewer than two boards, several
    that are to draft, or a profile without memory.
    """
    tables = [_Table(board, problem) for board in boards]
    layers = problem.size.layers
    best: tuple[int, int, _Table, list[tuple[_Table, int, bool]]] | None = None
    for d0 in _candidates(tables, problem):
        others = [t for t in tables if t is not d0]
        slowest = _slowest(others, layers, d0.occupied)
        if slowest is None or (best is not None and slowest > best[0]):
            continue
        # The maximum first, then the sum among the splits that keep it.  One pass that minimises
        # the pair would be wrong: the best whole need not have the best parts, since a part may
        # trade its own maximum, below that of the rest, for a smaller sum.
        cost, chosen = _shortest_way(d0, others, layers, slowest)
        if best is None or (slowest, cost) < best[:2]:
            best = slowest, cost, d0, chosen
    if best is None:
        raise DoesNotFit(f"{problem.size.name} does not fit on {len(boards)} boards")
    slowest, cost, d0, chosen = best
    left, order = list(tables), _in_order(d0, chosen)
    drafting = _take(left, d0)
    stages, placed = [], 0
    for table, k in order:
        seconds = table.board.profile.stage_seconds(problem.rows, k, problem.context)
        stages.append(Stage(_take(left, table), (placed, placed + k), seconds))
        placed += k
    return Plan(problem, drafting, tuple(stages), tuple((t.board, t.why_not(slowest)) for t in left),
                slowest / _NS, cost // _COUNT / _NS)


def alone(board: Board, problem: Problem) -> int:
    """Bytes that are left when ``board`` is D0 and V1, two processes, with all layers; negative if it
    cannot be."""
    return board.room - round(board.memory.process_mb * 1e6) - problem.d0 - problem.stage(
        problem.size.layers, True)


def most_layers(boards: Sequence[Board], problem: Problem) -> int:
    """How many layers the boards' memory holds beside a D0, for the best choice of it; -1 if none of
    them can be D0."""
    most = -1
    for d0 in [b for b in boards if b.role == "draft"] or [b for b in boards if b.role == "auto"]:
        if d0.room < problem.d0:
            continue
        rest = [(problem.layers_within(b, True), problem.layers_within(b, False)) for b in boards
                if b is not d0 and b.role != "draft"]
        plain = sum(b for _, b in rest)
        most = max([most, 0, *(plain - b + a for a, b in rest if a > 0)])
    return most


class _Table:
    """A board's times in nanoseconds, by number of layers."""

    def __init__(self, board: Board, problem: Problem) -> None:
        profile, layers = board.profile, problem.size.layers
        self.board, self.problem = board, problem
        self.stage = np.array([0, *(_ns(profile.stage_seconds(problem.rows, k, problem.context))
                                    for k in range(1, layers + 1))], dtype=np.int64)
        occupied, latency = profile.link_seconds(problem.size.segment_bytes(problem.rows))
        self.occupied, self.latency = _ns(occupied), _ns(latency)
        self.port = self.occupied + self.latency  # a hop, if this is the slower port
        self.lm_head = _ns(profile.verify_seconds(problem.rows))
        never = board.role == "draft"
        self.first = 0 if never else problem.layers_within(board, True)  # as V1
        self.later = 0 if never else problem.layers_within(board, False)
        self.key = (board.profile, board.role)

    def within(self, limit: int) -> tuple[int, int]:
        """The most layers as V1 and as a later stage with no time beyond ``limit``."""
        if self.occupied > limit:
            return 0, 0
        k = int(np.searchsorted(self.stage, limit, side="right")) - 1  # stage[0] = 0: at least 0
        return min(k, self.first), min(k, self.later)

    def why_not(self, slowest: int) -> str:
        """Why the best split does without this board."""
        if self.board.role == "draft":
            return "another board drafts"
        if not self.later:
            needs, has = self.problem.stage(1, False), max(self.board.room, 0)
            return f"too little memory for one layer: needs {needs / 1e6:,.0f} MB, has {has / 1e6:,.0f} MB"
        if self.occupied > slowest:
            return f"its port takes {self.occupied / 1e6:.3g} ms a segment, longer than the slowest stage"
        if self.stage[1] > slowest:
            return f"its {self.stage[1] / 1e6:.3g} ms a layer would make it the slowest stage"
        return "would not make the slowest stage faster"


def _ns(seconds: float) -> int:
    return round(min(seconds, _LONGEST) * _NS)


def _candidates(tables: Sequence[_Table], problem: Problem) -> list[_Table]:
    """The boards that may be D0: of those that are alike, one."""
    if len(tables) < 2:
        raise UsageError("a pipeline needs two boards at least: D0 and a stage")
    if len(tables) >= _COUNT:
        raise UsageError(f"{len(tables)} boards are more than a plan can weigh ({_COUNT - 1})")
    wanted = [t for t in tables if t.board.role == "draft"]
    if len(wanted) > 1:
        raise UsageError(f"only one board can draft, but {', '.join(t.board.name for t in wanted)} are to")
    able: list[_Table] = []
    for table in wanted or [t for t in tables if t.board.role == "auto"]:
        if table.board.room >= problem.d0 and all(table.key != other.key for other in able):
            able.append(table)
    return able


def _slowest(others: Sequence[_Table], layers: int, at_least: int) -> int | None:
    """The least limit under which ``others`` hold all layers; D0's port takes ``at_least``."""
    every = {at_least, *(t.occupied for t in others)}
    for table in others:
        every.update(table.stage[1:].tolist())
    limits = sorted(limit for limit in every if limit >= at_least)
    low, high = 0, len(limits)
    while low < high:
        middle = (low + high) // 2
        if _holds(others, layers, limits[middle]):
            high = middle
        else:
            low = middle + 1
    return limits[low] if low < len(limits) else None


def _holds(others: Sequence[_Table], layers: int, limit: int) -> bool:
    """Whether all layers can be placed: one board is V1, each takes as much as it can."""
    within = [table.within(limit) for table in others]
    plain = sum(later for _, later in within)
    return any(first > 0 and plain - later + first >= layers for first, later in within)


def _shortest_way(d0: _Table, others: Sequence[_Table], layers: int, limit: int,
                  ) -> tuple[int, list[tuple[_Table, int, bool]]]:
    """The least way of a segment with no stage slower than ``limit``: (cost, [(stage, layers, is V1)]).

    A state is (boards considered, V1 chosen, layers placed).  The hops of the best order follow
    from the choice alone.  Ports p on the path from V1 = v to D0 = d cost the larger of the two at
    every hop.  For a threshold t, the hops that cost at least t are those that touch a port of at
    least t; with these side by side, at an end of the path if an end is among them, they are as
    many as such ports, one more if neither end is among them, one less if all are.  Added up over
    t: sum p - min p + max p - max(p_v, p_d).  (``_in_order`` lays them out so.)  Taken in the order
    of their ports, the first board that is used brings the minimum and the last one the maximum.
    """
    ordered = sorted(others, key=lambda t: t.port)
    ways = np.full((2, layers + 1), _NEVER, dtype=np.int64)
    ways[0, 0] = (d0.lm_head + d0.port) * _COUNT + 1
    steps: list[tuple[Int64, Int64]] = []
    for table in ordered:
        following = ways.copy()
        taken = np.zeros((2, layers + 1), dtype=np.int64)  # layers; 0 where the board is not used
        as_first = np.zeros((2, layers + 1), dtype=np.int64)
        first, later = table.within(limit)
        ends = max(table.port, d0.port)
        v1 = max(table.latency, d0.latency) - ends
        for k in range(1, max(first, later) + 1):
            cost = (int(table.stage[k]) + table.port) * _COUNT + 1
            step = np.full(layers + 1 - k, cost, dtype=np.int64)  # from [0, layers - k] placed
            step[0] -= min(table.port, d0.port) * _COUNT
            step[-1] += ends * _COUNT
            moves = [(f, f, 0) for f in (0, 1) if k <= later] + [(0, 1, v1)] * (k <= first)
            for before, after, extra in moves:
                reached = ways[before, : layers + 1 - k] + step + extra * _COUNT
                better = (reached < following[after, k:]) & (ways[before, : layers + 1 - k] < _NEVER)
                following[after, k:][better] = reached[better]
                taken[after, k:][better] = k
                as_first[after, k:][better] = after - before
        steps.append((taken, as_first))
        ways = following
    chosen, flag, placed = [], 1, layers
    for table, (taken, as_first) in zip(reversed(ordered), reversed(steps), strict=True):
        k = int(taken[flag, placed])
        if k:
            is_first = bool(as_first[flag, placed])
            chosen.append((table, k, is_first))
            flag, placed = flag - is_first, placed - k
    return int(ways[1, layers]), chosen


def _in_order(d0: _Table, chosen: list[tuple[_Table, int, bool]]) -> list[tuple[_Table, int]]:
    """V1 first, then by port: the slow ones beside the slower one of V1 and D0."""
    [first] = [(t, k) for t, k, is_first in chosen if is_first]
    rest = sorted(((t, k) for t, k, is_first in chosen if not is_first), key=lambda s: s[0].port,
                  reverse=first[0].port >= d0.port)
    return [first, *rest]


def _take(left: list[_Table], wanted: _Table) -> Board:
    """Of the boards alike the first one that is left: they are used in the order given."""
    found = next(table for table in left if table.key == wanted.key)
    left.remove(found)
    return found.board
