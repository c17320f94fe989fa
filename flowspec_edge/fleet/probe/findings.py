"""What a check found: one type for `deploy init`, `plan` and `up`, the doctor, and the checks of kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.inventory import DeviceEntry
from flowspec_edge.fleet.probe.facts import NoAnswer
from flowspec_edge.util.terminal import printable

# failed: it keeps flowspec from working there; warning: only worth knowing.
State = Literal["ok", "warning", "failed", "unknown", "skipped"]
WORST = ("failed", "warning", "unknown", "skipped", "ok")

# (ssh's error, its meaning, the next step).  {address} and {port} are the board's.
_SSH = (
    ("Host key verification failed",
     "its host key is unknown here, or not the one that was known",
     "compare ssh-keyscan -p {port} {address} with the board's own; then ssh there once by hand, or after "
     "flashing it, ssh-keygen -R {address} first"),
    ("Permission denied", "it does not let this user in with this key",
     "see ssh_user and ssh_key in the cluster file; ssh-copy-id -p {port} puts a key there"),
    ("Connection refused", "nothing answers at port {port}",
     "start sshd there (sudo systemctl enable --now ssh), or see ssh_port in the cluster file"),
    ("timed out|No route to host|Network is unreachable", "{address} does not answer",
     "see whether the board is up, its cable, and the address in the cluster file"),
    ("Could not resolve|is unknown here", "the name {address} is unknown here",
     "give the board's address in the cluster file, or make the name known"),
)


@dataclass(frozen=True)
class Finding:
    """The outcome of the check ``check``; its texts, which may quote a board, do nothing to a terminal.

    found   in words, with figures
    advice  the next step; "" if there is none
    remedy  harmless commands of that step, for root
    fixed   whether the remedy was run and helped; None without --fix
    board   its name; "" where the context tells it
    error   of a computation, against float64, relative to the largest result; None without one
    """

    check: str
    state: State
    found: str = ""
    advice: str = ""
    remedy: tuple[tuple[str, ...], ...] = ()
    fixed: bool | None = None
    board: str = ""
    error: float | None = None

    def __post_init__(self) -> None:
        for name in ("check", "found", "advice"):
            object.__setattr__(self, name, printable(getattr(self, name)))

    @property
    def ok(self) -> bool:
        return self.state == "ok"

    def as_json(self) -> dict[str, Any]:
        """The fields that ``doctor --json`` promises."""
        told = {"check": self.check, "state": self.state, "found": self.found, "advice": self.advice}
        return told if self.fixed is None else {**told, "fixed": self.fixed}

    def __str__(self) -> str:
        return f"{self.board and f'{self.board}: '}{self.check}: {self.found}; {self.advice}"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for each check, in order of first appearance: those in the worst state, joined."""
    by_check: dict[str, list[Finding]] = {}
    for finding in findings:
        by_check.setdefault(finding.check, []).append(finding)
    return [_joined(check, group) for check, group in by_check.items()]


def _joined(check: str, group: list[Finding]) -> Finding:
    state = min((finding.state for finding in group), key=WORST.index)
    worst = [finding for finding in group if finding.state == state]
    if len(worst) == 1:
        return worst[0]
    return Finding(check, state, "; ".join(finding.found for finding in worst),
                   "; ".join(finding.advice for finding in worst if finding.advice))


def unreachable(device: DeviceEntry, error: str) -> Finding:
    """``error``: ssh's, in one line."""
    values = {"address": device.address, "port": device.ssh_port}
    for pattern, found, advice in _SSH:
        if re.search(pattern, error):
            return Finding("ssh", "failed", f"{found.format(**values)} ({error})", advice.format(**values),
                           board=device.name)
    return Finding("ssh", "failed", error, "ssh there by hand, and see what it says", board=device.name)


def no_facts(device: DeviceEntry, error: FlowspecError) -> Finding:
    """``error``: of asking the board."""
    if isinstance(error, NoAnswer):
        return Finding("python", "failed", error.found, error.advice, board=device.name)
    return unreachable(device, str(error))


def wrong_address(device: DeviceEntry, problem: tuple[str, str]) -> Finding:
    """``problem``: from ``addresses.address_problem``."""
    found, advice = problem
    return Finding("address", "failed", found, f"{advice} in the cluster file", board=device.name)
