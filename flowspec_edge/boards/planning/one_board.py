"""Whether one board is enough: for this program, and for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flowspec_edge.boards.planning.planner import CandidateBoard, SplitProblem
from flowspec_edge.boards.planning.scaling import scaled
from flowspec_edge.device_profile import load_profile, profile_names

BITS = 4.5  # of a weight in groups of 32 with a 16-bit scale: MLC's q4f16_1, GGUF's Q4_0
ENGINE_MB = 400  # assumed for a compiled engine's process with CUDA's context and kernels


def rate_text(tokens_per_second: float, decimals: int = 1) -> str:
    """Write a predicted rate, with no decimals where it is in thousands, as a small model's is."""
    if tokens_per_second >= 999.5:
        return f"{tokens_per_second:,.0f}"
    return f"{tokens_per_second:.{decimals if tokens_per_second >= 1 else 2}f}"


@dataclass(frozen=True)
class SingleBoardEstimate:
    """What one board would do alone.

    ``enough`` says whether one board is at least as fast as the pipeline; None if nothing was predicted.
    """

    board: str
    text: str
    plain_tokens_per_second: float  # of plain decoding
    strategy: str | None = None
    tokens_per_second: float | None = None
    enough: bool | None = None


def single_board_headroom(board: CandidateBoard, problem: SplitProblem) -> int:
    """Return the bytes left if ``board`` runs both D0 and a V1 with all layers, in one process; negative: too few."""
    return board.room - problem.d0 - problem.stage(problem.size.layers)


def plain_tokens_per_second(board: CandidateBoard, problem: SplitProblem) -> float:
    """Predict the tokens/s of plain decoding on ``board`` alone: all layers and lm_head on one row.

    The board's profile is scaled to the model.
    """
    profile, size = board.profile, problem.size
    return 1 / (profile.stage_seconds(1, size.layers, problem.context) + profile.verify_seconds(1))


def best_alone(boards: Sequence[CandidateBoard], problem: SplitProblem) -> CandidateBoard | None:
    """Return the fastest of the boards that can hold everything alone."""
    able = [b for b in boards if single_board_headroom(b, problem) >= 0]
    return min(able, key=lambda b: b.profile.stage_seconds(problem.rows, problem.size.layers, problem.context)
               + b.profile.verify_seconds(problem.rows), default=None)


@dataclass(frozen=True)
class SmallestBoard:
    """The profile with the least memory that holds everything, in the same element types."""

    profile: str
    plain_tokens_per_second: float


def smallest_board(problem: SplitProblem, candidates: Sequence[CandidateBoard] = ()) -> SmallestBoard | None:
    """Return the board with the least memory that runs the model alone.

    The choice is among ``candidates`` and the single boards whose profiles come with the package; None if none has
    room.
    """
    boards = [CandidateBoard(board.profile.name, board.profile) for board in candidates]
    boards += [CandidateBoard(profile.name, scaled(profile, problem.size)[0]) for name in profile_names()
               if (profile := load_profile(name)).kind == "device" and profile.memory
               and profile.conditions and profile.conditions.device == "cuda"]
    able = [board for board in boards if single_board_headroom(board, problem) >= 0]
    rates = {board.name: plain_tokens_per_second(board, problem) for board in able}
    best = min(able, key=lambda board: (board.memory.usable_mb, -rates[board.name]), default=None)
    return SmallestBoard(best.name, rates[best.name]) if best else None


@dataclass(frozen=True)
class OtherPrograms:
    """What an engine needs that runs the model on one board in 4 bits, in one process, without a draft head.

    needs_mb           weights, 16-bit caches of the context, and the process
    boards             those with so much usable memory
    tokens_per_second  of plain decoding on the fastest of them, by its memory's bandwidth; None without
                       boards or bandwidths
    """

    bits: float
    needs_mb: float
    boards: tuple[str, ...]
    tokens_per_second: float | None
    text: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def other_programs(boards: Sequence[CandidateBoard], problem: SplitProblem) -> OtherPrograms:
    size = problem.size
    in_16_bits = 2.0 if size.kv_cache == "int8" else 2 / size.bytes_per_value
    model_size = size.values * BITS / 8 + problem.context * size.layers * size.kv_row * in_16_bits
    read_bytes = model_size - size.vocabulary * size.hidden_width * BITS / 8  # a token needs a row of the embeddings
    needs = model_size / 1e6 + ENGINE_MB
    able = [board for board in boards if board.memory.usable_mb >= needs]
    rates = [(rate * 1e9 / read_bytes, board.name) for board in able if (rate := board.memory.gb_per_s)]
    most, fastest = max(rates, key=lambda pair: pair[0], default=(None, ""))
    needs_text = (f"{needs:,.0f} MB: {BITS} bits a weight, the cache of {problem.context} tokens, one process, "
                  "no draft head")
    if able:
        boards_by_kind: dict[str, str] = {}  # one of each kind
        for board in able:
            boards_by_kind.setdefault(board.profile.name, board.name)
        text = (f"other engines hold {size.name} in 4 bits on one board, {' or '.join(boards_by_kind.values())} "
                f"({needs_text})")
        if most is not None:
            text += f"; plain decoding makes about {rate_text(most)} tokens/s on {fastest}"
    else:
        text = f"other engines do not hold {size.name} in 4 bits on one of these boards either ({needs_text})"
    return OtherPrograms(BITS, round(needs, 3), tuple(board.name for board in able), most, text)
