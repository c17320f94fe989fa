"""Testbeds of equal boards by the planner's rule, wherever the name of a profile is taken.

    orin-nano-8gb-super:5/qwen3-32b/int4        BOARD:N/MODEL/DTYPE: one board drafts, N - 1 are stages

The board's profile is scaled to the model as ``flowspec plan`` scales it, and the model must fit.
"""

from __future__ import annotations

import re
from typing import cast, get_args

from flowspec_edge.device_profile import Profile, load_profile
from flowspec_edge.errors import UsageError

CONTEXT = 2048  # tokens for which there must be room: the default of ``flowspec plan``
_TESTBED = re.compile(r"(?P<board>[^:/]+):(?P<count>\d+)/(?P<model>.+)/(?P<dtype>[^/]+)")


def profile_or_testbed(name: str) -> Profile:
    """A testbed, or what ``load_profile`` takes, whose errors it has; also ``planner.DoesNotFit``."""
    match = _TESTBED.fullmatch(name)
    return _testbed(match) if match else load_profile(name)


def _testbed(match: re.Match[str]) -> Profile:
    # Here: they import torch, and most names are profiles.
    from flowspec_edge.fleet.planning import planner
    from flowspec_edge.fleet.planning.board_spec import parse_devices
    from flowspec_edge.fleet.planning.layer_split import problem_for
    from flowspec_edge.fleet.planning.memory_check import memory_error
    from flowspec_edge.fleet.planning.model_size import PlanDtype, model_bytes

    name = match[0]
    if match["dtype"] not in get_args(PlanDtype):
        raise UsageError(f"testbed {name}: no element type {match['dtype']!r}; there are: "
                         f"{', '.join(get_args(PlanDtype))}")
    dtype = cast(PlanDtype, match["dtype"])
    size = model_bytes(match["model"], dtype)
    members = parse_devices([f"{match['board']}:{match['count']}"])
    boards = [member.for_model(size)[0] for member in members]
    problem = problem_for(size, CONTEXT, 1, len(boards))
    try:
        planner.plan(boards, problem)
    except planner.DoesNotFit:
        raise memory_error(boards, problem, lambda other, kept_in: model_bytes(
            match["model"], other, kv_cache=kept_in), lambda key, value: f"{key} {value}") from None
    profile = boards[0].profile
    return profile.model_copy(update={
        "name": name, "kind": "testbed", "boards": len(boards),
        "summary": f"{len(boards)} × {match['board']} with {size.name} in {dtype}, by the planner's rule",
        "source": f"The profile {match['board']}, scaled to {size.name} in {dtype} as flowspec plan does."})
