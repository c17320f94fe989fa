"""The steps of each phase, and how to run a phase; also down and purge, which undo the other phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.actions import (
    Action,
    BoardOutcome,
    BoardState,
    Phase,
    Step,
    ask_boards,
    quote,
    run,
)
from flowspec_edge.boards.deploy.steps.activate import activate, release, settle, stop_and_forget, switch
from flowspec_edge.boards.deploy.steps.image import images_removed
from flowspec_edge.boards.deploy.steps.power import not_at_boot, power_restored
from flowspec_edge.boards.deploy.steps.software import software
from flowspec_edge.boards.inventory import DeviceEntry, Inventory
from flowspec_edge.boards.probe.facts import BoardFacts


def down(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    yield stop_and_forget("services stopped", [*facts.services])
    yield not_at_boot(facts)
    unit_files = [f"{paths.UNITS}/{unit}" for unit in (paths.DRAFT_UNIT, paths.VERIFY_UNIT) if unit in facts.units]
    yield Action("units removed", (quote("rm", "-f", *unit_files), "systemctl daemon-reload",
                                   f"sync -f {paths.UNITS}") if unit_files else ())
    yield from power_restored(facts)  # last: fails if the mode needs a reboot


def leave(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    yield from down(state, facts)
    yield Action("no release", (quote("rm", "-f", paths.UNSETTLED),
                                quote("mv", "-T", paths.CURRENT, paths.PREVIOUS),
                                f"sync -f {paths.HOME}") if facts.current else ())


def purge(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    yield from down(state, facts)
    if facts.images:
        yield Action("images removed", images_removed(facts.images))
    for path in (paths.HOME, paths.STATE, paths.CACHE, paths.ETC):
        yield Action(f"{path} removed", (quote("rm", "-rf", "--", path),) if facts.modes.get(path) else ())
    yield Action(f"user {paths.USER} removed", (quote("userdel", paths.USER),) if facts.user else ())


_PHASES: Mapping[Phase, Callable[[BoardState, BoardFacts], Iterator[Action]]] = {
    "software": software, "release": release, "switch": switch, "activate": activate, "settle": settle,
    "down": down, "leave": leave, "purge": purge}


def decide(phase: Phase, state: BoardState, facts: BoardFacts) -> list[Action]:
    """Return the phase's actions on a board with these facts; pure."""
    return list(_PHASES[phase](state, facts))


def bring_about(inventory: Inventory, phase: Phase, boards: Sequence[tuple[DeviceEntry, BoardState]],
                dry_run: bool = False, on_step: Callable[[Step], None] = lambda step: None,
                on_error: Callable[[str, str], None] = lambda board, error: None) -> list[BoardOutcome]:
    """Decide from the boards' present facts, and run one phase on all boards; parameters as for ``run``."""
    answers = ask_boards(inventory, [(device, state, None) for device, state in boards], not dry_run)
    return run(inventory, [
        (device, decide(phase, state, facts) if isinstance(facts, BoardFacts) else [
            Action("connect", error=str(facts))])
        for (device, state), facts in zip(boards, answers, strict=True)], dry_run, on_step, on_error)
