"""Testbeds of boards by the planner's rule, wherever the name of a profile is taken.

    orin-nano-8gb-super:5/qwen3-32b/int4                         BOARD:N/MODEL/DTYPE
    agx-orin-64gb:1,orin-nano-8gb-super:4/qwen3-32b/int4         BOARD:N,BOARD:N/MODEL/DTYPE

One board drafts, the others are stages. Each board's profile is scaled to the model as ``flowspec plan``
scales it, and the model must fit. Equal boards share the layers evenly; of several kinds, the planner chooses
which board drafts, the stages' order and their layers.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from flowspec_edge.device_profile import MixedBoards, Profile, load_profile
from flowspec_edge.errors import UsageError

if TYPE_CHECKING:
    from flowspec_edge.boards.planning.planner import CandidateBoard, PipelinePlan

CONTEXT = 2048  # tokens for which there must be room: the default of ``flowspec plan``
FORM = "BOARD:N[,BOARD:N]/MODEL/DTYPE"
_MOST_BOARDS = 64
_BOARD = r"[^:,]+:\d{1,6}"
_TESTBED = re.compile(rf"(?P<boards>{_BOARD}(?:,{_BOARD})*)/(?P<model>.+)/(?P<dtype>[^/]+)")


def profile_or_testbed(name: str, candidates: int | None = None) -> Profile:
    """Return a testbed, or what ``load_profile`` takes; errors as there, and ``planner.DoesNotFit``.

    candidates  of a testbed's candidate head; None: the sharder's default
    """
    match = _TESTBED.fullmatch(name)
    if match:
        return _testbed(match, candidates)
    if re.search("[:,]", name) and not Path(name).exists():
        raise UsageError(f"no testbed {name!r}: a testbed is {FORM}, such as "
                         "orin-nano-8gb-super:5/qwen3-32b/int4")
    return load_profile(name)


def _testbed(match: re.Match[str], candidates: int | None) -> Profile:
    # Here: they import torch, and most names are profiles.
    from flowspec_edge.boards.planning import planner
    from flowspec_edge.boards.planning.board_spec import parse_devices
    from flowspec_edge.boards.planning.layer_split import problem_for
    from flowspec_edge.boards.planning.memory_check import memory_error
    from flowspec_edge.boards.planning.model_size import PlanDtype, model_bytes

    name = match[0]
    if match["dtype"] not in get_args(PlanDtype):
        raise UsageError(f"testbed {name}: no element type {match['dtype']!r}; there are: "
                         f"{', '.join(get_args(PlanDtype))}")
    counts = Counter[str]()
    for board in match["boards"].split(","):
        kind, _, count = board.strip().rpartition(":")
        if not int(count):
            raise UsageError(f"testbed {name}: {kind} needs a number of boards of at least 1, not {count}")
        counts[kind] += int(count)
    if not 2 <= counts.total() <= _MOST_BOARDS:
        raise UsageError(f"testbed {name}: 2 to {_MOST_BOARDS} boards are needed, one of which drafts, not "
                         f"{counts.total()}")
    dtype = cast(PlanDtype, match["dtype"])
    size = model_bytes(match["model"], dtype, candidates=candidates)
    members = parse_devices([f"{kind}:{count}" for kind, count in counts.items()])
    boards = [member.for_model(size)[0] for member in members]
    problem = problem_for(size, CONTEXT, 1, len(boards))
    try:
        plan = planner.plan(boards, problem)
    except planner.DoesNotFit:
        raise memory_error(boards, problem, lambda other, cache_bits: model_bytes(
            match["model"], other, kv_cache=cache_bits, candidates=candidates),
            lambda key, value: f"{key} {value}") from None
    shown_model = f"{size.name} in {dtype}"
    scaled = f"scaled to {shown_model} as flowspec plan does."
    if len(counts) > 1:
        return _mixed(name, shown_model, scaled, plan)
    [(kind, count)] = counts.items()
    return boards[0].profile.model_copy(update={
        "name": name, "kind": "testbed", "boards": count,
        "summary": f"{count} × {kind} with {shown_model}, by the planner's rule",
        "source": f"The profile {kind}, {scaled}"})


def _mixed(name: str, shown_model: str, scaled: str, plan: PipelinePlan) -> MixedBoards:
    """Return the devices of the planner's split.

    Raise UsageError if it leaves a board out: figures would be those of other boards than the name says.
    """
    if plan.unused_boards:
        unused_names = ", ".join(board.name for board, _ in plan.unused_boards)
        raise UsageError(f"testbed {name}: the planner leaves out {unused_names}: {plan.unused_boards[0][1]}; name the "
                         "others alone")
    stages = [f"{_role_text(stage.board)} {hi - lo} layers" for stage in plan.stages for lo, hi in [stage.layers]]
    return MixedBoards.model_validate({
        **plan.d0.profile.model_dump(), "name": name, "kind": "testbed", "boards": len(plan.stages) + 1,
        "summary": f"{shown_model}, by the planner's split: {plan.d0.name} drafts; {', '.join(stages)}",
        "source": f"The boards' profiles, {scaled}",
        "verify": tuple(stage.board.profile for stage in plan.stages),
        "layers": tuple(hi - lo for lo, hi in (stage.layers for stage in plan.stages))})


def _role_text(board: CandidateBoard) -> str:
    return f"{board.name} computes"
