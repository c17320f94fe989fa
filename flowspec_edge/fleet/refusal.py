"""Why a model does not fit on some boards, in bytes, and what would help: one line.

Knows memory alone.  Does not know times: what does not fit is refused however fast it would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flowspec_edge.fleet.memory import ModelBytes, PlanDtype
from flowspec_edge.fleet.planner import Board, DoesNotFit, Problem, most_layers

_CONTEXTS = (8192, 4096, 2048, 1024, 512)
_MOST_BOARDS = 64  # more of one kind are no advice


def option(key: str, value: str | int) -> str:
    """How the command line spells it."""
    return f"--{key} {value}"


def refusal(boards: Sequence[Board], problem: Problem, size_in: Callable[[PlanDtype], ModelBytes],
            spell: Callable[[str, str | int], str] = option) -> DoesNotFit:
    """The error for a problem that ``planner.plan``, or ``splitting`` in a given order, found no split for.

    size_in  the same model's sizes in another element type
    spell    how the user says dtype or context
    """
    size, held = problem.size, most_layers(boards, problem)
    if held >= size.layers:  # only not as they are listed
        return DoesNotFit(
            f"{size.name} in {size.dtype} with {problem.context} tokens of context does not fit on the "
            f"boards as they are listed. Room beside the process: {_rooms(boards, problem)}. It would with "
            'other layers or in another order: let the planner choose, with role = "auto" and without layers')
    needed = problem.stage(size.layers, True) + problem.d0
    text = (f"{size.name} in {size.dtype} with {problem.context} tokens of context needs {_mb(needed)}: "
            f"{size.layers} layers of {_mb(size.layer)} and {_mb(problem.layer - size.layer)} of cache, "
            f"{_mb(size.embedding)} of embeddings on V1, {_mb(problem.d0)} on D0")
    if held < 0:
        text += ". No board that may draft holds D0's part"
    else:
        missing = size.layers - held
        text += (f". Beside D0 there is room for {_layers(held)}; {_layers(missing)} "
                 f"({_mb(missing * problem.layer)}) are missing")
    return DoesNotFit(f"{text}. Room beside the process: {_rooms(boards, problem)}. "
                      f"{_advice(boards, problem, size_in, spell)}")


def _rooms(boards: Sequence[Board], problem: Problem) -> str:
    """What each board could hold as a stage; boards alike together."""
    alike: dict[tuple[str, int], list[str]] = {}
    for board in boards:
        alike.setdefault((board.profile.name, max(board.room, 0)), []).append(board.name)
    layers = {board.name: _layers(problem.layers_within(board, False)) for board in boards}
    return "; ".join(f"{', '.join(names)}{' each' if len(names) > 1 else ''} {_mb(room)}, {layers[names[0]]}"
                     for (_, room), names in alike.items())


def _advice(boards: Sequence[Board], problem: Problem, size_in: Callable[[PlanDtype], ModelBytes],
            spell: Callable[[str, str | int], str]) -> str:
    """What would make it fit, each by itself."""

    def fits(changed: Problem, on: Sequence[Board] = boards) -> bool:
        return most_layers(on, changed) >= changed.size.layers

    found = []
    for dtype in ("fp16", "int4"):
        if problem.size.dtype in ("int4", dtype) or (problem.size.dtype == "bf16" and dtype == "fp16"):
            continue
        if fits(replace(problem, size=size_in(dtype))):
            found.append(spell("dtype", dtype))
            break
    shorter = (c for c in _CONTEXTS if c < problem.context and fits(replace(problem, context=c)))
    if (context := next(shorter, None)) is not None:
        found.append(spell("context", context))
    largest = replace(max(boards, key=lambda b: b.room), role="auto")
    for more in range(1, _MOST_BOARDS + 1):
        if fits(problem, [*boards, *[largest] * more]):
            found.append(f"{more} more like {largest.name}")
            break
    return f"What would help: {', or '.join(found)}" if found else "More memory on each board would help"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"
