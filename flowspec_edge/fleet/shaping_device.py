"""Shaping the link of a device that must be as it was afterwards, whatever happens.

Knows how the prior queueing discipline is noted and put back, and the dead-man: before anything is
changed, the device itself is told to put it back in so many seconds.  Does not know the shape
(``shaping``), nor how the device is reached (``commands``).

On the device a directory under /run belongs to one shaping at a time; in it are the script that
puts everything back and, without systemd, the process ids of the waiting dead-men.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.fleet import shaping
from flowspec_edge.fleet.commands import Runner

STATE = "/run/flowspec-shaping"
_UNIT = "flowspec-shaping-restore"
_SIMPLE = {"fq", "fq_codel", "pfifo", "pfifo_fast", "noqueue"}  # put back as they were, if without options


class DeviceShaping:
    """One interface of one device; a context manager that restores."""

    def __init__(self, runner: Runner, interface: str, protected_ports: Iterable[int],
                 restore_after_s: int = 300) -> None:
        """``restore_after_s``: without :meth:`apply` or :meth:`renew` for so long, the device restores
        itself."""
        self._runner = runner
        self._interface = interface
        self._ports = list(protected_ports)
        self._after_s = restore_after_s
        self._root: list[str] = []
        self._prior: list[dict[str, Any]] = []
        self._put_back = ""
        self._armed = 0  # dead-men so far; 0: nothing is to be restored
        self._shaped = False
        state = f"{STATE}/{interface}"
        self._state, self._script_file = shlex.quote(state), shlex.quote(f"{state}/restore")

    def start(self) -> None:
        """Check everything, note what is there, and arm the dead-man.  Nothing is shaped yet.

        FlowspecError if the device cannot be shaped, or could not be put back as it was.
        """
        self._become_root()
        shaping.check_kernel(self._runner, self._root)
        self._prior = self._shown()
        self._put_back = self._how_to_put_back()
        script = shaping.script([self._put_back, f"rm -rf {self._state}"])
        lines = [
            "umask 077", f"mkdir -p {STATE}",
            f"mkdir {self._state} 2>/dev/null || {{ echo {shlex.quote(self._busy())} >&2; exit 1; }}",
            f"printf %s {shlex.quote(script)} > {self._script_file}", *self._arm(1),
        ]
        self._armed = 1  # whatever the next line leaves, it must be undone
        try:
            self._run(lines)
        except FlowspecError as error:
            if self._busy() in str(error):  # it is another's
                self._armed = 0
            else:
                self._give_up(error)
            raise

    def apply(self, mbps: float | None) -> None:
        """Send at ``mbps`` (10^6 bits a second) at most; None: as before.  Renews the dead-man."""
        self.renew()
        if mbps is None:
            self._run([self._put_back])
        elif self._shaped:
            self._run(shaping.rate_commands(self._interface, mbps))
        else:
            self._run(shaping.commands(self._interface, mbps, self._ports))
        self._shaped = mbps is not None

    def renew(self) -> None:
        """Put the dead-man off again.

        FlowspecError if it has struck: what was measured since may have been on an unshaped link.
        """
        if not self._armed:
            raise FlowspecError(f"{self._runner.where}: the shaping of {self._interface} has not begun, "
                                "or is over")
        late = f"the link was put back as it was, for nothing was heard for {self._after_s} s"
        self._run([f"[ -e {self._script_file} ] || {{ echo {shlex.quote(late)} >&2; exit 1; }}",
                   *self._arm(self._armed + 1), *self._disarm(self._armed)])
        self._armed += 1

    def restore(self) -> None:
        """Put the prior queueing discipline back and cancel the dead-man; safe to call twice.

        FlowspecError if the device cannot be told, or is not as it was.
        """
        if not self._armed:
            return
        # The previous one, too: renewing may have been interrupted between the two.
        numbers = range(max(1, self._armed - 1), self._armed + 2)
        pids = [line for n in numbers for line in self._remember(n)]
        self._run([*pids, f"if [ -e {self._script_file} ]; then sh {self._script_file}; fi",
                   *(line for n in numbers for line in self._cancel(n)), f"rm -rf {self._state}"])
        self._armed, self._shaped = 0, False
        now = self._shown()
        if [_essence(entry) for entry in now] != [_essence(entry) for entry in self._prior]:
            raise FlowspecError(f"{self._runner.where}: {self._interface} is not as it was: see "
                                f"`tc qdisc show dev {self._interface}`")

    def __enter__(self) -> DeviceShaping:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    # ---- what is there -------------------------------------------------------------------------

    def _shown(self) -> list[dict[str, Any]]:
        text = self._runner.run(["sh", "-es"], shaping.script(
            [["tc", "-j", "qdisc", "show", "dev", self._interface]]))
        try:
            found = json.loads(text)
        except ValueError as error:
            raise FlowspecError(f"{self._runner.where}: `tc -j qdisc show` gives no JSON; it needs "
                                "iproute2 5 or newer") from error
        return list(found)

    def _how_to_put_back(self) -> str:
        """Shell text that restores the prior state; UsageError if none surely does."""
        where = f"{self._runner.where}: {self._interface}"
        explicit = [entry for entry in self._prior
                    if entry["handle"] != "0:" and entry["kind"] not in ("ingress", "clsact")]
        if not explicit:  # the kernel's default, which comes back by itself
            return shaping.removal(self._interface)
        root = explicit[0]
        if root["handle"] == shaping.HANDLE:
            raise UsageError(f"{where} is shaped already: {self._busy()}")
        kind, handle = root["kind"], root["handle"]
        if len(explicit) > 1 or not root.get("root") or kind not in _SIMPLE or not self._is_plain(root):
            raise UsageError(f"{where} has a queueing discipline ({kind} {handle}) that could not be put "
                             "back as it is; remove it first, or leave this board's link alone")
        add = ["tc", "qdisc", "add", "dev", self._interface, "root", "handle", handle, kind]
        return shaping.removal(self._interface, add)

    def _is_plain(self, entry: dict[str, Any]) -> bool:
        """Whether a qdisc of that kind has those very options where none are given.

        Tried out on an interface of equal MTU and queue in a namespace of its own.
        """
        device = shlex.quote(self._interface)
        trial = shaping.script([
            f"set -- $(cat /sys/class/net/{device}/mtu /sys/class/net/{device}/tx_queue_len)",
            "exec unshare --net -- sh -ec 'ip link set lo mtu $0 txqueuelen $1; "
            f"tc qdisc add dev lo root handle {entry['handle']} {entry['kind']}; "
            "tc -j qdisc show dev lo' $1 $2"])
        (plain,) = json.loads(self._runner.run([*self._root, "sh", "-es"], trial))
        return bool(plain.get("options") == entry.get("options"))

    # ---- dead-men ------------------------------------------------------------------------------

    def _arm(self, number: int) -> list[str]:
        wait = str(self._after_s)
        return [
            f"if {_SYSTEMD}; then systemd-run --quiet --collect --on-active={wait} "
            f"--timer-property=AccuracySec=1s --unit={self._unit(number)} /bin/sh {self._script_file}; "
            f"else setsid sh -c 'sleep {wait}; exec sh \"$0\"' {self._script_file} "
            f"</dev/null >/dev/null 2>&1 & echo $! > {self._pid_file(number)}; fi",
        ]

    def _disarm(self, number: int) -> list[str]:
        return [*self._remember(number), *self._cancel(number), f"rm -f {self._pid_file(number)}"]

    def _remember(self, number: int) -> list[str]:
        return [f"pid{number}=$(cat {self._pid_file(number)} 2>/dev/null || :)"]

    def _cancel(self, number: int) -> list[str]:
        return [f"if {_SYSTEMD}; then systemctl stop {self._unit(number)}.timer 2>/dev/null || :; "
                f"elif [ -n \"$pid{number}\" ]; then kill -- -$pid{number} 2>/dev/null || :; fi"]

    def _unit(self, number: int) -> str:
        return shlex.quote(f"{_UNIT}-{self._interface}-{number}")

    def _pid_file(self, number: int) -> str:
        return f"{self._state}/pid{number}"

    # ---- running -------------------------------------------------------------------------------

    def _become_root(self) -> None:
        if self._runner.run(["id", "-u"]).strip() == "0":
            return
        self._root = ["sudo", "-n"]
        try:
            self._runner.run([*self._root, "true"])
        except FlowspecError as error:
            raise UsageError(f"{error}; shaping needs root: log in as root, or let this user run sudo "
                             "without a password") from error

    def _run(self, lines: list[Any]) -> None:
        self._runner.run([*self._root, "sh", "-es"], shaping.script(lines))

    def _give_up(self, cause: FlowspecError) -> None:
        """Undo a start that failed halfway."""
        try:
            self.restore()
        except FlowspecError as error:
            raise FlowspecError(f"{cause}; and then: {error}") from cause

    def _busy(self) -> str:
        return (f"another run shapes {self._interface}, or one was killed and the device restores itself "
                f"soon; sh {STATE}/{self._interface}/restore does so now")


_SYSTEMD = "[ -d /run/systemd/system ]"


def _essence(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["kind"], entry["handle"], entry.get("parent"), entry.get("root")
