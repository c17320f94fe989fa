"""The doctor on all boards of a cluster: each one's system, clock and release, the model, and the links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from pydantic import TypeAdapter

from flowspec_edge.boards.commands import Runner, as_root, on_each, python_for, runner_for
from flowspec_edge.boards.doctor.run import apply_remedies
from flowspec_edge.boards.inventory import DeviceEntry, Inventory
from flowspec_edge.boards.links import tc
from flowspec_edge.boards.links.addresses import address_problem
from flowspec_edge.boards.links.between import measure_between
from flowspec_edge.boards.paths import HOME, PYTHON, STATE
from flowspec_edge.boards.probe.checks import AllBoards, CheckScope, Subject, judge
from flowspec_edge.boards.probe.facts import BoardFacts, NoAnswer, ask_system
from flowspec_edge.boards.probe.findings import Finding, merged, no_facts, unreachable, wrong_address
from flowspec_edge.boards.probe.service_rules import ReleaseOnBoard
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.interpreter import module_command

_TIMEOUT_S = 600.0  # a board reads torch from its SD card several times
_LINK_S = 0.5
_FINDINGS = TypeAdapter(list[Finding])
_RUN_IF_INSTALLED = 'if [ -e "$0" ]; then exec "$0" "$@"; fi'


@dataclass(frozen=True)
class BoardFindings:
    """What was found on a board; ``facts``: None if it cannot be reached, or its Python does not answer."""

    name: str
    findings: list[Finding]
    facts: BoardFacts | None = None

    @property
    def reached(self) -> bool:
        return not any(finding.check == "reached" for finding in self.findings)


def check_cluster(inventory: Inventory, storage: str | None = None,
                  done: Callable[[str], None] = lambda name: None, path: Path | None = None,
                  fix: bool = False) -> list[BoardFindings]:
    """Check all boards concurrently, then the links one by one, so that they do not disturb each other.

    A board that cannot be reached does not stop the others' checks.

    done  called with the name of what has been checked
    path  the cluster file; with it, if it names a model, check that the model fits
    fix   apply the harmless remedies
    """
    def check(device: DeviceEntry) -> BoardFindings:
        checked = _check_board(inventory, device, storage, fix)
        done(device.name)
        return checked

    boards = on_each(check, inventory.device)
    reached = {board.name: board for board in boards if board.reached}
    probed = {board.name: board.facts for board in boards if board.facts}
    for finding in judge("bare", AllBoards(probed)):
        reached[finding.board].findings.append(finding)
    if path is not None and inventory.cluster.model:
        from flowspec_edge.boards.doctor.model import board_parts  # imports torch

        # flowspec's own service releases its memory before the model is loaded.
        available = {name: memory.available + memory.held for name, board in reached.items()
                     if board.facts and (memory := board.facts.system.memory)}
        for name, part in board_parts(inventory, path, available).items():
            if name in reached:
                reached[name].findings.extend(judge("bare", part))
        done("whether the model fits")
    for source, target in pairwise(inventory.ring):
        if {source.name, target.name} <= reached.keys():
            rate = measure_between(inventory, source, target, _LINK_S, plain=True)
            reached[source.name].findings.extend(judge("bare", rate))
            done(f"the link from {source.name} to {target.name}")
    if fix:
        return [replace(board, findings=[replace(finding, fixed=bool(finding.fixed))
                                         for finding in board.findings]) for board in boards]
    return boards


def why_not_shaped(runner: Runner) -> str:
    """Return why links cannot be shaped there; "" if they can."""
    try:
        tc.try_kernel(runner, as_root([]))
    except FlowspecError as error:
        return str(error).removeprefix(f"{runner.device_name}: ")
    return ""


def _check_board(inventory: Inventory, device: DeviceEntry, storage: str | None, fix: bool) -> BoardFindings:
    release: list[Finding] = []
    shaping: str | None = None

    def ask() -> BoardFacts:
        return ask_system(inventory, device, directories=[HOME, STATE, *([storage] if storage else [])])

    def judged(facts: BoardFacts) -> list[Finding]:
        scope: CheckScope = "installed" if len(release) > 1 else "bare"
        subject = Subject.from_facts(inventory, device, facts, storage=storage or "", shaping=shaping)
        return merged(judge(scope, subject))

    try:
        runner = runner_for(inventory, device, _TIMEOUT_S)
        facts = ask()
        release = _by_release(inventory, device, runner)
        shaping = None if facts.system.sudo else why_not_shaped(runner)
        findings = judged(facts)
        if fix:
            findings = apply_remedies(findings, lambda: judged(ask()), runner)
    except NoAnswer as error:
        return BoardFindings(device.name, [*_by_release(inventory, device, runner), no_facts(device, error)])
    except FlowspecError as error:
        why, address_fault = unreachable(device, str(error)), address_problem(inventory, device)
        return BoardFindings(device.name, [
            Finding("reached", "failed", why.found, why.advice),
            *([replace(wrong_address(device, address_fault), check="network")] if address_fault else [])])
    # The release's findings replace those of the board's own Python.
    flowspec, *computed = release
    return BoardFindings(device.name, [flowspec, *findings, *computed], facts)


def _by_release(inventory: Inventory, device: DeviceEntry, runner: Runner) -> list[Finding]:
    """Return the findings of the board's own release; without an answer, a single one about the release."""
    python = python_for(inventory, device)
    command = module_command("flowspec_edge.boards.doctor.run", python=python)
    board_version = error = ""
    computed: list[Finding] = []
    try:
        output = runner.run(["sh", "-c", _RUN_IF_INSTALLED, *command])
        if output or python != PYTHON:
            flowspec, *computed = _FINDINGS.validate_json(output.splitlines()[-1])
            board_version = flowspec.found
    except (FlowspecError, ValueError, TypeError, IndexError) as failure:
        error = str(failure) if isinstance(failure, FlowspecError) else f"{python} is not there, or not a release's"
    release = ReleaseOnBoard(python, board_version, version("flowspec-edge"), error)
    return [*judge("installed", release), *(replace(finding, remedy=()) for finding in computed)]
