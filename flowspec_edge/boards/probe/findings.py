"""What a check found: one type for all that ``checks.CHECKS`` lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from flowspec_edge.boards.inventory import DeviceEntry, Unreached
from flowspec_edge.boards.probe.facts import NoAnswer
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.terminal import printable

# failed: it keeps flowspec from working there; warning: only worth knowing.
State = Literal["ok", "warning", "failed", "unknown", "skipped"]
WORST = ("failed", "warning", "unknown", "skipped", "ok")

# (ssh's or our error, its meaning, the next step); our own errors say what they mean.  {address} is the board's;
# {port} the one in the error or in the cluster file, {p} that of the file as an option; {file} says where the
# settings are.
_SSH = (
    ("Host key verification failed",
     "its host key is unknown here, or not the one that was known",
     "compare ssh-keyscan -p {port} {address} with the board's own; then ssh there once by hand, or after "
     "flashing it, ssh-keygen -R {known} first"),
    ("Permission denied", "it does not let this user in with this key",
     "see {user} and {key}{file}; ssh-copy-id {p}{target} puts a key there"),
    ("Connection refused", "nothing answers at port {port}",
     "start sshd there (sudo systemctl enable --now ssh), or see {ssh_port}{file}"),
    ("timed out|No route to host|Network is unreachable", "{address} does not answer",
     "see whether the board is up, its cable, and the address{file}"),
    ("has no IPv4 address here", "", "give the board's IPv4 address{file}"),
    ("is unknown here", "",
     "give the board's IPv4 address{file}, or a name that all boards know, from /etc/hosts or DNS; names in "
     "ssh's own configuration are not for boards"),
    ("Could not resolve", "the name {address} is unknown here",
     "give the board's IPv4 address{file}, or a name that all boards know, from /etc/hosts or DNS; names in "
     "ssh's own configuration are not for boards"),
)
_PORT = re.compile(r"\bport (\d+)\b")
_HANGS = re.compile(r"no command began within|did not finish within|the connection broke in ")
_IN_FILE = {"user": "ssh_user", "key": "ssh_key", "ssh_port": "ssh_port", "file": " in the cluster file"}
_BY_OPTION = {"user": "--user", "key": "--key", "ssh_port": "--port", "file": ""}


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
        """Return the fields that ``doctor --json`` promises."""
        fields = {"check": self.check, "state": self.state, "found": self.found, "advice": self.advice}
        return fields if self.fixed is None else {**fields, "fixed": self.fixed}

    def __str__(self) -> str:
        return f"{self.board and f'{self.board}: '}{self.check}: {self.found}; {self.advice}"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge the findings of each check into one, in order of first appearance: those in the worst state, joined."""
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


def unreachable(device: DeviceEntry, error: str, settings_in: Literal["file", "options"] = "file") -> Finding:
    """Return the finding for a board that ssh does not reach.

    error        ssh's or a runner's, in one line
    settings_in  where the user says how to reach the board
    """
    error = error.removeprefix(f"{device.label}: ")  # a finding names the board itself
    port_match, port = _PORT.search(error), device.ssh_port
    values = {**(_IN_FILE if settings_in == "file" else _BY_OPTION), "address": device.address,
              "port": port_match[1] if port_match else port or 22, "p": f"-p {port} " if port else "",
              "known": f"'[{device.address}]:{port}'" if port not in (None, 22) else device.address,
              "target": f"{device.ssh_user}@{device.address}" if device.ssh_user else device.address}
    if _HANGS.search(error):
        reason, _, advice = error.rpartition(": ")
        return Finding("ssh", "failed", reason, advice, board=device.name)
    for pattern, reason, advice in _SSH:
        if re.search(pattern, error):
            found = f"{reason.format(**values)} ({error})" if reason else error
            return Finding("ssh", "failed", found, advice.format(**values), board=device.name)
    return Finding("ssh", "failed", error, "ssh there by hand, and see what it says", board=device.name)


def in_one_line(device: DeviceEntry, error: Exception) -> str:
    """Return the ``error`` of a command on the board; where the board was not reached, with the next step."""
    if not isinstance(error, Unreached):
        return str(error)
    return str(unreachable(device, str(error).removeprefix(f"{device.name}: ")))


def no_facts(device: DeviceEntry, error: FlowspecError, settings_in: Literal["file", "options"] = "file"
             ) -> Finding:
    """Return the finding for the ``error`` of asking the board; ``settings_in``: as for ``unreachable``."""
    if isinstance(error, NoAnswer):
        return Finding("python", "failed", error.reason, error.advice, board=device.name)
    return unreachable(device, str(error), settings_in)


def wrong_address(device: DeviceEntry, problem: tuple[str, str]) -> Finding:
    """Return the finding for the ``problem`` from ``addresses.address_problem``."""
    reason, advice = problem
    return Finding("address", "failed", reason, f"{advice} in the cluster file", board=device.name)
