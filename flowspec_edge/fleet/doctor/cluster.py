"""The doctor on all boards of a cluster: each one's system, clock and release, the model, and the links."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from pydantic import TypeAdapter

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.doctor.checks import (
    check_bare_board,
    check_l4t,
    check_network,
    check_system,
)
from flowspec_edge.fleet.doctor.run import apply_remedies
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.fleet.network import tc
from flowspec_edge.fleet.network.addresses import address_problem
from flowspec_edge.fleet.network.remote_shaping import LinkRate, measure_between
from flowspec_edge.fleet.paths import HOME, PYTHON, STATE
from flowspec_edge.fleet.probe.facts import BoardFacts, NoAnswer, ask_system
from flowspec_edge.fleet.probe.findings import Finding, no_facts, unreachable
from flowspec_edge.fleet.probe.preflight import shared_machine_ids
from flowspec_edge.fleet.remote.runner import Runner, as_root
from flowspec_edge.fleet.remote.ssh import python_for, runner_for

_TIMEOUT_S = 600.0  # a board reads torch from its SD card several times
_MAX_SKEW_S = 1.0  # beyond it, the logs of two boards cannot be correlated
_SLOW_MBPS = 100.0  # Fast Ethernet; what the FlowSpec paper calls a slow network
_LINK_S = 0.5
_FINDINGS = TypeAdapter(list[Finding])
_RUN_IF_INSTALLED = 'if [ -e "$0" ]; then exec "$0" "$@"; fi'


@dataclass(frozen=True)
class BoardFindings:
    """``facts``: None if the board cannot be reached, or its Python does not answer."""

    name: str
    findings: list[Finding]
    facts: BoardFacts | None = None

    @property
    def reached(self) -> bool:
        return not any(finding.check == "reached" for finding in self.findings)


def check_cluster(inventory: Inventory, storage: str | None = None,
                  done: Callable[[str], None] = lambda name: None, path: Path | None = None,
                  fix: bool = False) -> list[BoardFindings]:
    """All boards concurrently, then the links one by one, so that they do not disturb each other.

    A board that cannot be reached does not stop the others' checks.

    done  called with the name of what has been checked
    path  the cluster file; with it, if it names a model, check that the model fits
    fix   apply the harmless remedies
    """
    def check(device: DeviceEntry) -> BoardFindings:
        checked = _check_board(inventory, device, storage, fix)
        done(device.name)
        return checked

    with ThreadPoolExecutor(len(inventory.device)) as pool:
        boards = list(pool.map(check, inventory.device))
    reached = {board.name: board for board in boards if board.reached}
    probed = {board.name: board.facts for board in boards if board.facts}
    for problem in shared_machine_ids(probed):
        findings = reached[problem.board].findings
        findings.append(problem)
    if path is not None and inventory.cluster.model:
        from flowspec_edge.fleet.doctor.model import check_model  # imports torch

        # flowspec's own service releases its memory before the model is loaded.
        available = {name: memory.available + memory.held for name, board in reached.items()
                     if board.facts and (memory := board.facts.system.memory)}
        for name, findings in check_model(inventory, path, available).items():
            if name in reached:
                reached[name].findings.extend(findings)
        done("whether the model fits")
    for source, target in pairwise(inventory.ring):
        if {source.name, target.name} <= reached.keys():
            rate = measure_between(inventory, source, target, _LINK_S, plain=True)
            reached[source.name].findings.append(check_link(rate))
            done(f"the link from {source.name} to {target.name}")
    if fix:
        return [replace(board, findings=[replace(finding, fixed=bool(finding.fixed))
                                         for finding in board.findings]) for board in boards]
    return boards


def check_link(rate: LinkRate) -> Finding:
    name = f"link to {rate.target}"
    if rate.measure is None:
        return Finding(name, "failed", rate.error, "see whether both are in one network, and no firewall is "
                                                   "between them")
    found = f"{rate.measure.mbps:.0f} Mbps, {rate.measure.latency_ms:.2f} ms"
    if rate.measure.mbps < _SLOW_MBPS:
        return Finding(name, "warning", found, "see whether the cable and the switch are made for 1 Gbps; "
                                               "ethtool shows what was agreed on")
    return Finding(name, "ok", found)


def check_skew(offset_s: float, uncertainty_s: float) -> Finding:
    """``offset_s``: how far the board's clock is ahead of this machine's, ± ``uncertainty_s``."""
    found = f"{offset_s:+.2f} s against this machine's, ± {uncertainty_s:.2f}"
    if abs(offset_s) - uncertainty_s > _MAX_SKEW_S:
        return Finding("clock", "warning", found,
                       "sudo timedatectl set-ntp true, on both; without internet see the check of the time")
    return Finding("clock", "ok", found)


def check_shaping(runner: Runner) -> Finding:
    """Whether `flowspec sweep bandwidth --cluster` can throttle the board's link; ok in any case."""
    try:
        tc.try_kernel(runner, as_root([]))
    except FlowspecError as error:
        why = str(error).removeprefix(f"{runner.where}: ")
        return Finding("link shaping", "ok",
                       f"not possible, and only flowspec sweep bandwidth --cluster needs it: {why}",
                       tc.requirements())
    return Finding("link shaping", "ok", "sch_htb and cls_u32 work")


def _check_board(inventory: Inventory, device: DeviceEntry, storage: str | None, fix: bool) -> BoardFindings:
    problem = address_problem(inventory, device)
    wrong = [Finding("network", "failed", problem[0], f"{problem[1]} in the cluster file")] if problem else []
    release: list[Finding] = []

    def ask() -> BoardFacts:
        return ask_system(inventory, device, places=[HOME, STATE, *([storage] if storage else [])])

    def judge(facts: BoardFacts) -> list[Finding]:
        if len(release) > 1:
            return check_system(facts.system, storage or "", inventory.power_mode(device))
        return check_bare_board(inventory, device, facts, storage or "")

    try:
        runner = runner_for(inventory, device, _TIMEOUT_S)
        facts = ask()
        release = _by_release(inventory, device, runner)
        found = judge(facts)
        if fix:
            found = apply_remedies(found, lambda: judge(ask()), runner)
    except NoAnswer as error:
        return BoardFindings(device.name, [*_by_release(inventory, device, runner), no_facts(device, error)])
    except FlowspecError as error:
        why = unreachable(device, str(error))
        return BoardFindings(device.name, [Finding("reached", "failed", why.found, why.advice), *wrong])
    system = facts.system
    found += [*(wrong or [check_network(system, resolve(device), inventory.interface(device))]),
              *check_l4t(system), *(() if system.sudo else (check_shaping(runner),))]
    # The release's findings replace those of the board's own Python.
    flowspec, *computed = release
    return BoardFindings(device.name, [check_skew(facts.ahead, facts.within), flowspec, *found, *computed],
                         facts)


def _by_release(inventory: Inventory, device: DeviceEntry, runner: Runner) -> list[Finding]:
    """Without an answer, a single finding about the release."""
    python = python_for(inventory, device)
    command = [python, "-m", "flowspec_edge.fleet.doctor.run"]
    try:
        told = runner.run(["sh", "-c", _RUN_IF_INSTALLED, *command])
        if not told and python == PYTHON:
            return [Finding("flowspec", "ok", "not installed yet; flowspec deploy up installs it")]
        return [_compare(finding) for finding in _FINDINGS.validate_json(told.splitlines()[-1])]
    except (FlowspecError, ValueError, TypeError, IndexError) as error:
        why = str(error) if isinstance(error, FlowspecError) else f"{python} is not there, or not a release's"
        return [Finding("flowspec", "failed", why, f"install this release there, so that {python} has it")]


def _compare(finding: Finding) -> Finding:
    """All boards have to run one release."""
    here = version("flowspec-edge")
    if finding.check != "flowspec" or finding.found == here:
        return finding
    return replace(finding, state="failed", found=f"{finding.found}, here {here}",
                   advice="install the same release on all boards")
