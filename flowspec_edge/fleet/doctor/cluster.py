"""The doctor on all boards of a cluster: each one's system, clock and release, the model, and the links."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.doctor.checks import (
    check_bare_board,
    check_l4t,
    check_network,
    check_system,
    wrong_address,
)
from flowspec_edge.fleet.doctor.run import apply_remedies
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory, resolve
from flowspec_edge.fleet.network import tc
from flowspec_edge.fleet.network.addresses import address_problem
from flowspec_edge.fleet.network.remote_shaping import LinkRate, measure_between
from flowspec_edge.fleet.paths import HOME, PYTHON, STATE
from flowspec_edge.fleet.probe.facts import board_facts
from flowspec_edge.fleet.probe.findings import Finding, unreachable
from flowspec_edge.fleet.probe.preflight import shared_machine_ids
from flowspec_edge.fleet.remote.runner import LocalRunner, Runner, as_root
from flowspec_edge.fleet.remote.ssh import SshRunner, is_here, python_for

_TIMEOUT_S = 600.0  # a board reads torch from its SD card several times
_MAX_SKEW_S = 1.0  # beyond it, the logs of two boards cannot be correlated
_SLOW_MBPS = 100.0  # Fast Ethernet; what the FlowSpec paper calls a slow network
_LINK_S = 0.5
_RUN_IF_INSTALLED = 'if [ -e "$0" ]; then exec "$0" "$@"; fi'


@dataclass(frozen=True)
class BoardFindings:
    """``facts``: of the probe, empty if the board cannot be reached."""

    name: str
    findings: list[Finding]
    facts: dict[str, Any] = field(default_factory=dict)

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
    probed = {board.name: board.facts for board in boards if board.facts.get("files")}
    for problem in shared_machine_ids(probed):
        findings = reached[problem.board].findings
        findings.append(problem)
    if path is not None and inventory.cluster.model:
        from flowspec_edge.fleet.doctor.model import check_model  # imports torch

        # flowspec's own service releases its memory before the model is loaded.
        available = {name: memory["available"] + memory["held"] for name, board in reached.items()
                     if (memory := board.facts.get("memory"))}
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
    try:
        runner: Runner = (LocalRunner(device.name, timeout_s=_TIMEOUT_S) if is_here(device) else
                          SshRunner(inventory, device, timeout_s=_TIMEOUT_S))
        clock = _clock(runner)
    except FlowspecError as error:
        why = unreachable(device, str(error))
        return BoardFindings(device.name, [Finding("reached", "failed", why.found, why.advice),
                                           *([wrong_address(problem)] if problem else ())])
    release = _by_release(inventory, device, runner)
    installed = len(release) > 1

    def ask() -> dict[str, Any]:
        return board_facts(inventory, device, paths=[HOME, STATE, *([storage] if storage else [])])

    def judge(facts: dict[str, Any]) -> list[Finding]:
        if installed and facts["python"]:
            return check_system(facts, storage or "", inventory.power_mode(device))
        return check_bare_board(inventory, device, facts, storage or "")

    try:
        facts = ask()
        found = judge(facts)
        if fix:
            found = apply_remedies(found, lambda: judge(ask()), runner)
    except FlowspecError as error:
        return BoardFindings(device.name, [clock, *release, Finding(
            "python", "failed", str(error), "see board_python in the cluster file")])
    if facts["python"]:
        found += [wrong_address(problem) if problem else
                  check_network(facts, resolve(device), inventory.interface(device)), *check_l4t(facts),
                  *(() if facts["sudo"] else (check_shaping(runner),))]
    # The release's findings replace those of the board's own Python.
    flowspec, *computed = release
    return BoardFindings(device.name, [clock, flowspec, *found, *computed], facts)


def _by_release(inventory: Inventory, device: DeviceEntry, runner: Runner) -> list[Finding]:
    """Without an answer, a single finding about the release."""
    python = python_for(inventory, device)
    command = [python, "-m", "flowspec_edge.fleet.doctor.run"]
    try:
        told = runner.run(["sh", "-c", _RUN_IF_INSTALLED, *command])
        if not told and python == PYTHON:
            return [Finding("flowspec", "ok", "not installed yet; flowspec deploy up installs it")]
        return [_compare(Finding(**finding)) for finding in json.loads(told.splitlines()[-1])]
    except (FlowspecError, ValueError, TypeError, IndexError) as error:
        why = str(error) if isinstance(error, FlowspecError) else f"{python} is not there, or not a release's"
        return [Finding("flowspec", "failed", why, f"install this release there, so that {python} has it")]


def _clock(runner: Runner) -> Finding:
    before = time.time()
    theirs = float(runner.run(["date", "+%s.%N"]))
    after = time.time()
    return check_skew(theirs - (before + after) / 2, (after - before) / 2)


def _compare(finding: Finding) -> Finding:
    """All boards have to run one release."""
    here = version("flowspec-edge")
    if finding.check != "flowspec" or finding.found == here:
        return finding
    return replace(finding, state="failed", found=f"{finding.found}, here {here}",
                   advice="install the same release on all boards")
