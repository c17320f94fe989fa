"""The check-up of all boards of a cluster: each one's own, its clock, its release, and the links.

Knows what boards have to have in common, and that one that cannot be reached says nothing of the others.
Does not know what a board checks by itself (``checkup_run``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.checkup import Finding
from flowspec_edge.fleet.commands import LocalRunner, Runner
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.remote import LinkRate, measure_between
from flowspec_edge.fleet.ssh import SshRunner, is_here, python_for

_PATIENCE_S = 600.0  # a board reads torch from its card several times
_SKEW_S = 1.0  # more, and the logs of two boards cannot be read side by side
_SLOW_MBPS = 100.0  # Fast Ethernet; what the FlowSpec paper calls a slow network
_LINK_S = 0.5


@dataclass(frozen=True)
class Checked:
    """A board by its name in the cluster file, and what was found on it."""

    name: str
    findings: list[Finding]


def check_fleet(inventory: Inventory, storage: str | None = None,
                done: Callable[[str], None] = lambda name: None, path: Path | None = None,
                fix: bool = False) -> list[Checked]:
    """All boards at once, then the pipeline's links one after the other, which nothing may disturb.

    storage  where shards are to lie, on each
    done     called with what has been checked
    path     the cluster file; with it, and if it names a model, whether that fits
    fix      put right what does no harm
    """
    def check(device: DeviceEntry) -> Checked:
        checked = Checked(device.name, _board(inventory, device, storage, fix))
        done(device.name)
        return checked

    with ThreadPoolExecutor(len(inventory.device)) as pool:
        boards = list(pool.map(check, inventory.device))
    answering = {board.name for board in boards if not any(f.check == "reached" for f in board.findings)}
    if path is not None and inventory.cluster.model:
        from flowspec_edge.fleet.checkup_model import check_draft_device, check_model  # takes torch

        fits = check_model(inventory, path)
        for board in boards:
            if board.name in answering and board.name in fits:
                board.findings.append(fits[board.name])
        if drafting := check_draft_device(inventory, path):
            for board in boards:
                if board.name in answering and board.name == drafting[0]:
                    board.findings.append(drafting[1])
        done("whether the model fits")
    for source, target in pairwise(inventory.ring):
        if {source.name, target.name} <= answering:
            rate = measure_between(inventory, source, target, _LINK_S)
            next(board for board in boards if board.name == source.name).findings.append(check_link(rate))
            done(f"the link from {source.name} to {target.name}")
    if fix:
        return [replace(board, findings=[replace(finding, fixed=bool(finding.fixed))
                                         for finding in board.findings]) for board in boards]
    return boards


def check_link(rate: LinkRate) -> Finding:
    """What a link's measurement means."""
    name = f"link to {rate.target}"
    if rate.measure is None:
        return Finding(name, "failed", rate.error, "see whether both are in one network, and no firewall is "
                                                   "between them")
    found = f"{rate.measure.mbps:.0f} Mbps, {rate.measure.latency_ms:.2f} ms"
    if rate.measure.mbps < _SLOW_MBPS:
        return Finding(name, "warning", found, "see whether the cable and the switch are made for 1 Gbps; "
                                               "ethtool shows what was agreed on")
    return Finding(name, "ok", found)


def check_skew(offset_s: float, uncertain_s: float) -> Finding:
    """``offset_s``: how far a board's clock is ahead of ours, known to within ``uncertain_s``."""
    found = f"{offset_s:+.2f} s against this machine's, ± {uncertain_s:.2f}"
    if abs(offset_s) - uncertain_s > _SKEW_S:
        return Finding("clock", "warning", found, "sudo timedatectl set-ntp true, on both")
    return Finding("clock", "ok", found)


def _board(inventory: Inventory, device: DeviceEntry, storage: str | None, fix: bool) -> list[Finding]:
    try:
        runner: Runner = (LocalRunner(device.name, timeout_s=_PATIENCE_S) if is_here(device) else
                          SshRunner(inventory, device, timeout_s=_PATIENCE_S))
        clock = _clock(runner)
    except FlowspecError as error:
        return [Finding("reached", "failed", str(error),
                        "ssh there by hand: the board must be up, its host key known, and the key allowed")]
    python = python_for(inventory, device)
    mode = inventory.cluster.power_mode if device.power_mode is None else device.power_mode
    arguments = [*(["--power-mode", mode] if mode else []), *(["--fix"] if fix else []),
                 *([storage] if storage else [])]
    try:
        told = runner.run([python, "-m", "flowspec_edge.fleet.checkup_run", *arguments])
        findings = [Finding(**finding) for finding in json.loads(told.splitlines()[-1])]
    except (FlowspecError, ValueError, TypeError, IndexError) as error:
        return [clock, Finding("flowspec", "failed", str(error),
                               f"install this release there, so that {python} has it")]
    return [clock, *map(_compare, findings)]


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
