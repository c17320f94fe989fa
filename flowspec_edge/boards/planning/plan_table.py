"""A plan as a table: each board's role, layers and memory, and why a board is not used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowspec_edge.boards.planning.planner import CandidateBoard, PipelinePlan, PlannedStage, SplitProblem
from flowspec_edge.boards.planning.scaling import Basis, Scaling
from flowspec_edge.util.jetson import process_memory

_SINGLE_BOARD = "D0+V1"  # the role of a board that runs both, in one process


@dataclass(frozen=True)
class BoardRow:
    """A board's row; ``role``: "D0", "V1", …, "D0+V1", or None for an unused board.

    layers          [lo, hi) of the model
    headroom_mb     usable memory that stays free
    stage_ms        time of a segment in its layers; None for D0
    scaled          how its profile was scaled to the model; "" if it was measured with that model
    basis           what stage_ms rests on; "bandwidth": the memory bandwidth that other engines reach
    assumed         from what its profile was estimated; "" if the file names one
    stage_ms_range  from the fastest to the slowest by such a bandwidth; None if it is not known
    """

    name: str
    profile: str
    provenance: str
    role: str | None
    layers: tuple[int, int] | None
    weights_mb: float
    kv_mb: float
    process_mb: float
    usable_mb: float
    headroom_mb: float
    stage_ms: float | None
    why: str | None
    scaled: str
    basis: Basis
    stage_ms_range: tuple[float, float] | None = None
    assumed: str = ""

    @property
    def used_mb(self) -> float:
        return self.usable_mb - self.headroom_mb


def plan_rows(plan: PipelinePlan, scaled: Mapping[str, Scaling]) -> list[BoardRow]:
    """Return the rows of D0, the stages in order, then the unused boards; ``scaled`` is by the boards' names."""
    problem, last = plan.problem, len(plan.stages)
    d0_kv = problem.cached * problem.size.draft_kv_row
    rows = [_row(plan.d0, scaled, "D0", problem.size.d0_weights, d0_kv)]
    rows += [_stage(stage, i, i == last, problem, scaled) for i, stage in enumerate(plan.stages, start=1)]
    return rows + [_row(board, scaled, None, why=why) for board, why in plan.unused_boards]


def alone_rows(board: CandidateBoard, others: Sequence[CandidateBoard], problem: SplitProblem,
               scaled: Mapping[str, Scaling]) -> list[BoardRow]:
    size = problem.size
    kv = size.layers * problem.layer_cache + problem.cached * size.draft_kv_row
    milliseconds = board.profile.stage_seconds(problem.rows, size.layers, problem.context) * 1e3
    row = _row(board, scaled, _SINGLE_BOARD, size.target_weights + size.d0_weights, kv, (0, size.layers),
               milliseconds)
    why = f"no pipeline over these boards fits, and {board.name} alone holds everything"
    return [row, *(_row(other, scaled, None, why=why) for other in others)]


def _stage(stage: PlannedStage, rank: int, last: bool, problem: SplitProblem,
           scaled: Mapping[str, Scaling]) -> BoardRow:
    size, (lo, hi) = problem.size, stage.layers
    weights = (hi - lo) * size.layer + last * size.norm
    kv = (hi - lo) * problem.layer_cache
    return _row(stage.board, scaled, f"V{rank}", weights, kv, stage.layers, stage.seconds * 1e3)


def _row(board: CandidateBoard, scaled: Mapping[str, Scaling], role: str | None, weights: int = 0,
         kv: int = 0, layers: tuple[int, int] | None = None, stage_ms: float | None = None,
         why: str | None = None) -> BoardRow:
    memory, profile, scaling = board.memory, board.profile, scaled[board.name]
    span = None
    if stage_ms is not None and scaling.basis == "bandwidth" and memory.gb_per_s and memory.gb_per_s_range:
        slow, fast = memory.gb_per_s_range
        span = stage_ms * memory.gb_per_s / fast, stage_ms * memory.gb_per_s / slow
    process_mb = memory.process_mb if role else 0.0
    if role and role.startswith("D0"):
        process_mb += process_memory().d0
    used_mb = (weights + kv) / 1e6 + process_mb
    return BoardRow(board.name, profile.name, profile.provenance, role, layers, weights / 1e6, kv / 1e6,
                    process_mb, memory.usable_mb, memory.usable_mb - used_mb, stage_ms, why, scaling.note,
                    scaling.basis, span)
