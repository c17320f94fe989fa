"""down stops and removes the services; purge also removes everything else of flowspec's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowspec_edge.fleet import paths
from flowspec_edge.fleet.deploy.engine.desired_state import Action, BoardState
from flowspec_edge.fleet.deploy.engine.run import quote
from flowspec_edge.fleet.deploy.steps.power import not_at_boot, power_restored
from flowspec_edge.fleet.probe.facts import BoardFacts


def down(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    yield stop_and_forget("services stopped", [*facts.services])
    yield not_at_boot(facts)
    there = [f"{paths.UNITS}/{unit}" for unit in (paths.DRAFT_UNIT, paths.VERIFY_UNIT) if unit in facts.units]
    yield Action("units removed", (quote("rm", "-f", *there), "systemctl daemon-reload",
                                   f"sync -f {paths.UNITS}") if there else ())
    yield from power_restored(facts)  # last: fails if the mode needs a reboot


def purge(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    yield from down(state, facts)
    for path in (paths.HOME, paths.STATE, paths.CACHE, paths.ETC):
        yield Action(f"{path} removed", (quote("rm", "-rf", "--", path),) if facts.modes.get(path) else ())
    yield Action(f"user {paths.USER} removed", (quote("userdel", paths.USER),) if facts.user else ())


def stop_and_forget(step: str, units: Sequence[str]) -> Action:
    """Stop and disable units, and clear their failed state."""
    return Action(step, (f"systemctl disable --quiet --now {quote(*units)}",
                         f"systemctl reset-failed {quote(*units)} 2>/dev/null || true") if units else (),
                  timeout_s=120.0)
