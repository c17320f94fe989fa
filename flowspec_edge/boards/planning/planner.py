"""Finds the best split of a model: which board is D0, which are stages, their order and their layers.

Objectives, in this order, with memory as a hard limit:
1. A rate that the caller gives, to four digits, which must not rise with either of the next two times; by default
   the inverse of the first.
2. The time of the slowest stage, which limits throughput: its compute for a segment, or its port's time for
   the segment's hidden states if that is longer.
3. The latency of one segment: all stages and hops, and lm_head on D0.
4. The number of boards.

The search is exact over every subset of the boards, choice of D0, stages, V1, order and layers, with two
simplifications: a hop takes as long as the slower of its two ports (token ids from D0 to V1 take no
bandwidth), and each stage is charged for the final norm (some KB), because any may become the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.boards.inventory import Role
from flowspec_edge.d0.prompt_chunks import MOST, STEP, USUAL
from flowspec_edge.device_profile import Memory, Profile
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.stage.quant.sizes import EXPANDED_BYTES
from flowspec_edge.util.jetson import process_memory

if TYPE_CHECKING:
    from flowspec_edge.boards.planning.model_size import ModelBytes

Int64 = NDArray[np.int64]

_NS = 1e9
_LONGEST = 1e4  # seconds; longer times are clipped, so that sums stay within 64 bits
_COUNT = 4096  # a cost is whole nanoseconds × _COUNT + boards: boards decide exact ties only
_NEVER = np.int64(2**61)


@dataclass(frozen=True)
class CandidateBoard:
    """A board for the planner; ``role``: "draft" must be D0; "verify" is a stage or unused; "auto" is open."""

    name: str
    profile: Profile
    role: Role = "auto"

    @property
    def memory(self) -> Memory:
        """Raise UsageError for a profile without [memory]."""
        if self.profile.memory is None:
            raise UsageError(f"profile {self.profile.name} has no [memory]: a plan needs total_mb, usable_mb "
                             "and process_mb; measure the board with: flowspec device profile")
        return self.profile.memory

    @property
    def room(self) -> int:
        """Return the bytes for weights and caches."""
        return round((self.memory.usable_mb - self.memory.process_mb) * 1e6)


@dataclass(frozen=True)
class SplitProblem:
    """What a split must hold.

    tentative  further cache rows, for the drafts of all requests (the draft session's ``cache_rows``)
    rows       of the segment whose time is minimised
    requests   at once
    """

    size: ModelBytes
    context: int
    tentative: int
    rows: int = 16
    requests: int = 1

    @property
    def cached(self) -> int:
        return self.context + self.tentative

    @property
    def layer(self) -> int:
        """Return the bytes of a layer with its cache."""
        return self.size.layer + self.layer_cache

    @property
    def layer_cache(self) -> int:
        """Return the bytes of a layer's cache."""
        return self.size.layer_cache(self.cached, self.requests, self.tentative // self.requests)

    def stage(self, layers: int) -> int:
        """Return a stage's bytes: layers, their cache, and the final norm."""
        return layers * self.layer + self.size.norm

    @property
    def d0_part(self) -> int:
        """Return the bytes of D0's weights and caches."""
        return self.size.d0_weights + self.cached * self.size.draft_kv_row

    @property
    def d0(self) -> int:
        """Return the bytes of D0's part, and what D0's process takes beyond a stage's."""
        return self.d0_part + round(process_memory().d0 * 1e6)

    def prompt_rows_that_fit(self, board: CandidateBoard, layers: int, drafts: bool = False) -> int:
        """Return the rows of a prompt's segment for which ``board`` has memory.

        The memory is what is left beside ``layers`` and, if the board ``drafts``, D0's part.  What ``USUAL`` rows take
        is part of a process's memory.  Recurrent layers compute no more at once.
        """
        size = self.size
        if size.state:
            return USUAL
        free_bytes = board.room - self.stage(layers) - self.d0 * drafts - EXPANDED_BYTES * (size.dtype == "int4")
        row = (size.row_values + self.cached) * size.bytes_per_value  # activations, and what it sees of the cache
        return min(MOST, USUAL + max(free_bytes, 0) // row // STEP * STEP)

    def layers_within(self, board: CandidateBoard) -> int:
        free_bytes = board.room - self.stage(0)
        return min(max(free_bytes, 0) // self.layer, self.size.layers)


@dataclass(frozen=True)
class PlannedStage:
    board: CandidateBoard
    layers: tuple[int, int]
    seconds: float  # compute for a segment, at the planned context


@dataclass(frozen=True)
class PipelinePlan:
    problem: SplitProblem
    d0: CandidateBoard
    stages: tuple[PlannedStage, ...]
    unused_boards: tuple[tuple[CandidateBoard, str], ...]  # (board, reason)
    slowest: float  # seconds: objective 2
    latency: float  # seconds: objective 3

    @property
    def predicted_prompt_rows(self) -> int:
        """Rows of a prompt's segment for which every stage has memory.

        Only predictions use it: a stage tries at its start for how many rows it has memory, and says so in its Hello.
        """
        return min(self.problem.prompt_rows_that_fit(stage.board, stage.layers[1] - stage.layers[0])
                   for stage in self.stages)

    @property
    def link_bound(self) -> bool:
        return self.slowest > max(stage.seconds for stage in self.stages) + 1 / _NS


    @property
    def context_ms(self) -> float:
        """The part of the slowest stage's time in which it reads the context's cache."""
        stage = max(self.stages, key=lambda stage: stage.seconds)
        lo, hi = stage.layers
        empty = stage.board.profile.stage_seconds(self.problem.rows, hi - lo)
        return (stage.seconds - empty) * 1e3


class DoesNotFit(FlowspecError):
    exit_code = 2


Rate = Callable[[CandidateBoard, float, float], float]  # of (D0, the slowest stage's time, the latency)


def shortest_slot(d0: CandidateBoard, slowest: float, latency: float) -> float:
    """Return the rate of a pipeline that several requests keep full."""
    return 1 / slowest


def plan(boards: Sequence[CandidateBoard], problem: SplitProblem, rate: Rate = shortest_slot) -> PipelinePlan:
    """Find the best split by the objectives of this module.

    Raise :class:`DoesNotFit` if there is none.  Raise UsageError for fewer than two boards, several with the role
    "draft", or a profile without [memory].
    """
    return search(boards, problem, rate)[0]


def search(boards: Sequence[CandidateBoard], problem: SplitProblem, rate: Rate) -> list[PipelinePlan]:
    """Return the best split, then others that were compared with it, each of other boards: the best first.

    The boards of the split with the fastest slowest stage are among theirs.  Errors as for :func:`plan`.
    """
    kinds: list[CandidateBoard] = []  # a board of each kind
    tables = []
    for board in boards:
        alike = (i for i, other in enumerate(kinds)
                 if (board.profile, board.role) == (other.profile, other.role))
        if (kind := next(alike, len(kinds))) == len(kinds):
            kinds.append(board)
        tables.append(_Table(board, problem, kind))
    splits: list[_Split] = []
    for d0 in _candidates(tables, problem):
        splits += _frontier(d0, [t for t in tables if t is not d0], problem.size.layers, rate, splits)
    if not splits:
        raise DoesNotFit(f"{problem.size.name} does not fit on {len(boards)} boards")
    shortest = min(split.slowest for split in splits)
    plans: dict[tuple[int, ...], PipelinePlan] = {}
    for split in sorted(splits, key=lambda split: split.order):
        if (key := split.boards) not in plans:
            plans[key] = split.as_plan(tables, problem, shortest)
    return list(plans.values())


@dataclass(frozen=True)
class _Split:
    """A split of the layers.

    slowest  in ns
    cost     latency in ns × _COUNT + boards
    stages   (board, layers, is V1)
    """

    rate: float
    slowest: int
    cost: int
    d0: _Table
    stages: list[tuple[_Table, int, bool]]

    @property
    def order(self) -> tuple[float, int, int]:
        return -self.rate, self.slowest, self.cost

    @property
    def boards(self) -> tuple[int, ...]:
        """Equal for splits over equal boards with an equal D0."""
        return self.d0.kind, *sorted(table.kind for table, _, _ in self.stages)

    def as_plan(self, tables: Sequence[_Table], problem: SplitProblem, shortest: int) -> PipelinePlan:
        unplaced, order = list(tables), _in_order(self.d0, self.stages)
        drafting = _take(unplaced, self.d0)
        stages, first_layer = [], 0
        for table, k in order:
            seconds = table.board.profile.stage_seconds(problem.rows, k, problem.context)
            stages.append(PlannedStage(_take(unplaced, table), (first_layer, first_layer + k), seconds))
            first_layer += k
        unused_boards = tuple((table.board, table.reason_unused(self.slowest, shortest)) for table in unplaced)
        return PipelinePlan(problem, drafting, tuple(stages), unused_boards, self.slowest / _NS,
                            self.cost // _COUNT / _NS)


def _frontier(d0: _Table, others: Sequence[_Table], layers: int, rate: Rate, compared: Sequence[_Split]
              ) -> Iterator[_Split]:
    """Yield splits with this D0 among which is the best, unless one of ``compared`` is better.

    For a time limit of the slowest stage the least latency follows from a dynamic program.  It falls as the
    limit rises, so between two limits no split is better than (the lower limit, the latency of the upper
    one); intervals in which that is no gain are left out.  One dynamic program over the pair would be wrong,
    because optimal substructure does not hold: a part may trade its own maximum, if it is below that of the
    rest, for a smaller sum.
    """
    limits = _limits(others, layers, d0.occupied)
    if not limits:
        return
    best = min((split.order for split in compared), default=(0.0, 0, 0))

    def value(slowest: int, cost: int) -> float:
        # Rates are estimates: what differs by less is equal, and the faster slowest stage decides.
        return float(f"{rate(d0.board, slowest / _NS, cost // _COUNT / _NS):.4g}")

    def at(index: int) -> _Split:
        nonlocal best
        cost, stages = _least_latency(d0, others, layers, limits[index])
        slowest = max(d0.occupied, *(max(int(t.stage[k]), t.occupied) for t, k, _ in stages))
        split = _Split(value(slowest, cost), slowest, cost, d0, stages)
        best = min(best, split.order)
        return split

    ends = at(0), at(len(limits) - 1)
    yield from ends
    intervals = [(0, len(limits) - 1, *ends)]
    while intervals:
        low, high, lower, upper = intervals.pop()
        if high - low < 2 or lower.cost == upper.cost:
            continue
        limit = limits[low + 1]
        if (-value(limit, upper.cost), limit, upper.cost) >= best:
            continue
        middle = (low + high) // 2
        split = at(middle)
        yield split
        intervals += [(middle, high, split, upper), (low, middle, lower, split)]


def most_layers(boards: Sequence[CandidateBoard], problem: SplitProblem) -> int:
    """Return the number of layers that fit, for the best choice of D0; -1 if no board can be D0."""
    most = -1
    for d0 in [b for b in boards if b.role == "draft"] or [b for b in boards if b.role == "auto"]:
        if d0.room < problem.d0:
            continue
        most = max(most, sum(problem.layers_within(b) for b in boards if b is not d0 and b.role != "draft"))
    return most


class _Table:
    """A board's times in nanoseconds, by number of layers; boards of one ``kind`` are equal."""

    def __init__(self, board: CandidateBoard, problem: SplitProblem, kind: int) -> None:
        profile, layers = board.profile, problem.size.layers
        self.kind = kind
        self.board, self.problem = board, problem
        self.stage = np.array([0, *(_ns(profile.stage_seconds(problem.rows, k, problem.context))
                                    for k in range(1, layers + 1))], dtype=np.int64)
        occupied, latency = profile.link_seconds(problem.size.segment_bytes(problem.rows))
        self.occupied, self.latency = _ns(occupied), _ns(latency)
        self.port = self.occupied + self.latency  # a hop's time if this is the slower port
        self.lm_head = _ns(profile.verify_seconds(problem.rows))
        self.most = 0 if board.role == "draft" else problem.layers_within(board)

    def within(self, limit: int) -> int:
        """Return the most layers that keep every time within ``limit``."""
        if self.occupied > limit:
            return 0
        k = int(np.searchsorted(self.stage, limit, side="right")) - 1  # stage[0] = 0: at least 0
        return min(k, self.most)

    def reason_unused(self, slowest: int, shortest: int) -> str:
        """Return why the board is not used; ``shortest``: the fastest slowest stage that the boards allow, in ns."""
        if self.board.role == "draft":
            return "another board drafts"
        if not self.most:
            needs, has = self.problem.stage(1), max(self.board.room, 0)
            return (f"too little memory for one layer: {needs / 1e6:,.0f} MB are needed, and "
                    f"{has / 1e6:,.0f} MB are there")
        if self.occupied > slowest:
            return (f"a segment takes {self.occupied / 1e6:.3g} ms at the network port, longer than in the "
                    "slowest stage")
        if self.stage[1] > slowest:
            return f"one layer takes {self.stage[1] / 1e6:.3g} ms there, longer than the slowest stage"
        if slowest > shortest:
            return "adding it would give fewer tokens/s"
        return "adding it would not make the slowest stage faster"


def _ns(seconds: float) -> int:
    return round(min(seconds, _LONGEST) * _NS)


def _candidates(tables: Sequence[_Table], problem: SplitProblem) -> list[_Table]:
    """Return the boards that may be D0; of identical ones, only the first."""
    if len(tables) < 2:
        raise UsageError("a pipeline needs at least two boards: D0 and a stage")
    if len(tables) >= _COUNT:
        raise UsageError(f"{len(tables)} boards are too many: a plan takes at most {_COUNT - 1}")
    draft_tables = [t for t in tables if t.board.role == "draft"]
    if len(draft_tables) > 1:
        raise UsageError('only one board can have the role "draft", but '
                         f"{', '.join(t.board.name for t in draft_tables)} have it")
    able: list[_Table] = []
    for table in draft_tables or [t for t in tables if t.board.role == "auto"]:
        if table.board.room >= problem.d0 and all(table.kind != other.kind for other in able):
            able.append(table)
    return able


def _limits(others: Sequence[_Table], layers: int, at_least: int) -> list[int]:
    """Return the time limits, rising, within which ``others`` hold all layers; D0's port takes ``at_least``."""
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
    return limits[low:]


def _holds(others: Sequence[_Table], layers: int, limit: int) -> bool:
    """Return whether all layers can be placed if each board takes as many as it can."""
    return sum(table.within(limit) for table in others) >= layers


def _least_latency(d0: _Table, others: Sequence[_Table], layers: int, limit: int,
                  ) -> tuple[int, list[tuple[_Table, int, bool]]]:
    """Return the least latency with no stage slower than ``limit``: (cost, [(stage, layers, is V1)]).

    A dynamic program over (boards considered, V1 chosen, layers placed).  In the best order the cost of the
    hops depends on the chosen boards alone: on the path from V1 = v to D0 = d each hop costs the larger of
    its two ports p.  For a threshold t, the hops that cost at least t are those that touch a port of at least
    t.  In the best order these ports are neighbours, at an end of the path if an end is among them; the
    number of such hops is then the number of such ports, plus one if neither end is among them, minus one if
    all ports are.  Summed over t: sum p - min p + max p - max(p_v, p_d).  (``_in_order`` produces this
    order.)  Boards are visited in the order of their ports, so the first one used contributes the minimum and
    the last one the maximum.
    """
    ordered = sorted(others, key=lambda t: t.port)
    least_costs = np.full((2, layers + 1), _NEVER, dtype=np.int64)
    least_costs[0, 0] = (d0.lm_head + d0.port) * _COUNT + 1
    steps: list[tuple[Int64, NDArray[np.bool_]]] = []
    layers_placed = np.arange(layers + 1)
    for table in ordered:
        most = table.within(limit)
        counts = np.arange(1, max(most, 1) + 1)[:, None]  # layers of this board: rows of the arrays
        before = layers_placed - counts
        ends = max(table.port, d0.port)
        v1 = max(table.latency, d0.latency) - ends
        step = (table.stage[counts] + table.port) * _COUNT + 1
        step = step - (before == 0) * min(table.port, d0.port) * _COUNT + (layers_placed == layers) * ends * _COUNT
        possible = (before >= 0) & (least_costs[:, before] < _NEVER) & (counts <= most)
        as_later = np.where(possible, least_costs[:, before] + step, _NEVER)
        as_first = np.where(as_later[0] < _NEVER, as_later[0] + v1 * _COUNT, _NEVER)
        is_first = as_first < as_later[1]
        options = np.stack((as_later[0], np.minimum(as_later[1], as_first)))
        k = options.argmin(axis=1)
        least = np.take_along_axis(options, k[:, None], axis=1)[:, 0]
        better = least < least_costs
        flags = np.zeros((2, layers + 1), dtype=bool)
        flags[1] = is_first[k[1], layers_placed]
        steps.append((np.where(better, k + 1, 0), flags))  # layers: 0 where the board is not used
        least_costs = np.where(better, least, least_costs)
    stages, flag, remaining = [], 1, layers
    for table, (layer_counts, flags) in zip(reversed(ordered), reversed(steps), strict=True):
        if count := int(layer_counts[flag, remaining]):
            as_v1 = bool(flags[flag, remaining])
            stages.append((table, count, as_v1))
            flag, remaining = flag - as_v1, remaining - count
    return int(least_costs[1, layers]), stages


def _in_order(d0: _Table, stages: list[tuple[_Table, int, bool]]) -> list[tuple[_Table, int]]:
    """Order the stages: V1 first, then by port, the slow ports next to the slower one of V1 and D0."""
    [first] = [(t, k) for t, k, is_first in stages if is_first]
    others = sorted(((t, k) for t, k, is_first in stages if not is_first), key=lambda s: s[0].port,
                    reverse=first[0].port >= d0.port)
    return [first, *others]


def _take(tables: list[_Table], like: _Table) -> CandidateBoard:
    match = next(table for table in tables if table.kind == like.kind)
    tables.remove(match)
    return match.board
