"""The steps of each phase, and how to run a phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from flowspec_edge.fleet.deploy.engine.desired_state import Action, BoardOutcome, BoardState, Phase, Step
from flowspec_edge.fleet.deploy.engine.run import ask_boards, run
from flowspec_edge.fleet.deploy.steps.activate import activate, settle, switch
from flowspec_edge.fleet.deploy.steps.release import release
from flowspec_edge.fleet.deploy.steps.remove import down, purge
from flowspec_edge.fleet.deploy.steps.software import software
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.probe.facts import BoardFacts

_PHASES: Mapping[Phase, Callable[[BoardState, BoardFacts], Iterator[Action]]] = {
    "software": software, "release": release, "switch": switch, "activate": activate, "settle": settle,
    "down": down, "purge": purge}


def decide(phase: Phase, state: BoardState, facts: BoardFacts) -> list[Action]:
    """Pure: the phase's actions on a board with these facts."""
    return list(_PHASES[phase](state, facts))


def bring_about(inventory: Inventory, phase: Phase, boards: Sequence[tuple[DeviceEntry, BoardState]],
                dry_run: bool = False, on_step: Callable[[Step], None] = lambda step: None,
                on_error: Callable[[str, str], None] = lambda board, error: None) -> list[BoardOutcome]:
    """Decide from the boards' present facts, and run one phase on all boards; parameters as for ``run``."""
    asked = ask_boards(inventory, [(device, state, None) for device, state in boards], not dry_run)
    return run(inventory, [
        (device, decide(phase, state, facts) if isinstance(facts, BoardFacts) else [
            Action("connect", error=str(facts))])
        for (device, state), facts in zip(boards, asked, strict=True)], dry_run, on_step, on_error)
