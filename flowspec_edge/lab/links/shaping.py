"""Shapes the links between boards; a board restores its link even if this machine disappears.

A dead man's switch: before any change, the board starts a timer that restores its queueing discipline, and
shaping renews this timer.  A directory under /run on the board locks the interface.  It has the restore
script, a file that names the run with the lock and, without systemd, the timers' process ids.
"""

from __future__ import annotations

import json
import shlex
import uuid
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from flowspec_edge.boards.commands import Runner, protected_ports, runner_for
from flowspec_edge.boards.inventory import Inventory
from flowspec_edge.boards.links import tc
from flowspec_edge.boards.links.between import LinkRate, measure_between
from flowspec_edge.errors import FlowspecError, UsageError

STATE = "/run/flowspec-shaping"
_UNIT = "flowspec-shaping-restore"
_RESTORABLE = {"fq", "fq_codel", "pfifo", "pfifo_fast", "noqueue"}  # with default options


class DeviceShaping:
    def __init__(self, runner: Runner, interface: str, protected_ports: Iterable[int],
                 restore_after_s: int = 300) -> None:
        """Take a device's interface.

        ``restore_after_s``: the device restores itself after this time without ``apply`` or ``renew``.
        """
        self._runner = runner
        self._interface = interface
        self._ports = list(protected_ports)
        self._after_s = restore_after_s
        self._root: list[str] = []
        self._prior: list[dict[str, Any]] = []
        self._restoration = ""
        self._armed = 0  # timers started; 0: nothing to restore
        self._shaped = False
        state = f"{STATE}/{interface}"
        self._state, self._script_file = shlex.quote(state), shlex.quote(f"{state}/restore")
        # The file is there while the lock is this run's: after a late renewal it may be another's.
        self._run_id = uuid.uuid4().hex
        self._run_file = shlex.quote(f"{state}/run-{self._run_id}")

    def start(self) -> None:
        """Save the state and start the timer; FlowspecError if the device cannot be shaped or restored."""
        self._become_root()
        tc.check_kernel(self._runner, self._root)
        self._prior = self._qdiscs()
        self._restoration = self._restore_script()
        script = tc.script([self._restoration, f"rm -rf {self._state}"])
        lines = [
            "umask 077", f"mkdir -p {STATE}",
            f"mkdir {self._state} 2>/dev/null || {{ echo {shlex.quote(self._busy())} >&2; exit 1; }}",
            f"touch {self._run_file}", f"printf %s {shlex.quote(script)} > {self._script_file}",
            *self._arm(1),
        ]
        self._armed = 1  # a partial start must be undone too
        try:
            self._run(lines)
        except FlowspecError as error:
            if self._busy() in str(error):  # another run holds the lock
                self._armed = 0
            else:
                self._give_up(error)
            raise

    def apply(self, mbps: float | None) -> None:
        """Limit sending to ``mbps`` (10^6 bits/s), None: unshaped; renews the timer."""
        self.renew()
        if mbps is None:
            self._run([self._restoration])
        elif self._shaped:
            self._run(tc.rate_commands(self._interface, mbps))
        else:
            self._run(tc.commands(self._interface, mbps, self._ports))
        self._shaped = mbps is not None

    def renew(self) -> None:
        """Restart the timer; FlowspecError if it has expired, so that the link was unshaped for a while."""
        if not self._armed:
            raise FlowspecError(f"{self._runner.device_name}: the shaping of {self._interface} has not begun, "
                                "or is over")
        late = f"the link was restored, because its shaping was not renewed for {self._after_s} s"
        self._run([f"[ -e {self._run_file} ] || {{ echo {shlex.quote(late)} >&2; exit 1; }}",
                   *self._arm(self._armed + 1), *self._disarm(self._armed)])
        self._armed += 1

    def restore(self) -> None:
        """Restore the queueing discipline, unless the link is another run's by now, and cancel the timer; idempotent.

        FlowspecError if the device cannot be reached, or its state differs afterwards.
        """
        if not self._armed:
            return
        # The previous timer, too: a renewal may have been interrupted half-way.
        numbers = range(max(1, self._armed - 1), self._armed + 2)
        pids = [line for n in numbers for line in self._remember(n)]
        others = self._run([*pids, f"if [ -e {self._run_file} ]; then "
                            f"if [ -e {self._script_file} ]; then sh {self._script_file}; fi; "
                            f"rm -rf {self._state}; elif [ -e {self._state} ]; then echo others; fi",
                            *(line for n in numbers for line in self._cancel(n))])
        self._armed, self._shaped = 0, False
        if others:
            return
        now = self._qdiscs()
        if [_comparable(entry) for entry in now] != [_comparable(entry) for entry in self._prior]:
            raise FlowspecError(f"{self._runner.device_name}: {self._interface} is not as it was: see "
                                f"`tc qdisc show dev {self._interface}`")

    def __enter__(self) -> DeviceShaping:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def _qdiscs(self) -> list[dict[str, Any]]:
        text = self._runner.run(["sh", "-es"], tc.script(
            [["tc", "-j", "qdisc", "show", "dev", self._interface]]))
        try:
            disciplines = json.loads(text)
        except ValueError as error:
            raise FlowspecError(f"{self._runner.device_name}: `tc -j qdisc show` gives no JSON; it needs "
                                "iproute2 5 or newer") from error
        return list(disciplines)

    def _restore_script(self) -> str:
        """Return the restoring script; UsageError if the state cannot be restored reliably."""
        link_name = f"{self._runner.device_name}: {self._interface}"
        explicit = [entry for entry in self._prior
                    if entry["handle"] != "0:" and entry["kind"] not in ("ingress", "clsact")]
        if not explicit:  # the kernel restores its default itself
            return tc.removal(self._interface)
        root = explicit[0]
        if root["handle"] == tc.HANDLE:
            raise UsageError(f"{link_name} is shaped already: {self._busy()}")
        kind, handle = root["kind"], root["handle"]
        if len(explicit) > 1 or not root.get("root") or kind not in _RESTORABLE or not self._is_plain(root):
            raise UsageError(f"{link_name} has a queueing discipline ({kind} {handle}) that could not be "
                             "restored; remove it first, or leave this board's link alone")
        add = ["tc", "qdisc", "add", "dev", self._interface, "root", "handle", handle, kind]
        return tc.removal(self._interface, add)

    def _is_plain(self, entry: dict[str, Any]) -> bool:
        """Whether the qdisc has default options: those on an equal interface in a temporary namespace."""
        device = shlex.quote(self._interface)
        script = tc.script([
            f"set -- $(cat /sys/class/net/{device}/mtu /sys/class/net/{device}/tx_queue_len)",
            "exec unshare --net -- sh -ec 'ip link set lo mtu $0 txqueuelen $1; "
            f"tc qdisc add dev lo root handle {entry['handle']} {entry['kind']}; "
            "tc -j qdisc show dev lo' $1 $2"])
        (plain,) = json.loads(self._runner.run([*self._root, "sh", "-es"], script))
        return bool(plain.get("options") == entry.get("options"))

    def _arm(self, number: int) -> list[str]:
        """Return a timer that does nothing if the link is another run's by then.

        Without systemd it waits until the timer is a session of its own, so that it can be cancelled.
        """
        wait, pid_file = str(self._after_s), self._pid_file(number)
        files = f"{self._script_file} {self._run_file}"
        return [
            f"if {_SYSTEMD}; then systemd-run --quiet --collect --on-active={wait} "
            f"--timer-property=AccuracySec=1s --unit={self._unit(number)} "
            f"/bin/sh -c '{_RESTORE_IF_PRESENT}' {files}; "
            f"else setsid sh -c 'echo $$ > \"$2\"; sleep {wait}; {_RESTORE_IF_PRESENT}' {files} "
            f"{pid_file} </dev/null >/dev/null 2>&1 & until [ -s {pid_file} ]; do sleep 0.02; done; fi",
        ]

    def _disarm(self, number: int) -> list[str]:
        return [*self._remember(number), *self._cancel(number), f"rm -f {self._pid_file(number)}"]

    def _remember(self, number: int) -> list[str]:
        return [f"pid{number}=$(cat {self._pid_file(number)} 2>/dev/null || :)"]

    def _cancel(self, number: int) -> list[str]:
        return [f"if {_SYSTEMD}; then systemctl stop {self._unit(number)}.timer 2>/dev/null || :; "
                f"elif [ -n \"$pid{number}\" ]; then kill -- -$pid{number} 2>/dev/null || :; fi"]

    def _unit(self, number: int) -> str:
        return shlex.quote(f"{_UNIT}-{self._interface}-{self._run_id}-{number}")

    def _pid_file(self, number: int) -> str:
        return f"{self._run_file}-pid{number}"

    def _become_root(self) -> None:
        if self._runner.run(["id", "-u"]).strip() == "0":
            return
        self._root = ["sudo", "-n"]
        try:
            self._runner.run([*self._root, "true"])
        except FlowspecError as error:
            raise UsageError(f"{error}; shaping needs root: log in as root, or let this user run sudo "
                             "without a password") from error

    def _run(self, lines: list[Any]) -> str:
        return self._runner.run([*self._root, "sh", "-es"], tc.script(lines))

    def _give_up(self, cause: FlowspecError) -> None:
        try:
            self.restore()
        except FlowspecError as error:
            raise FlowspecError(f"{cause}; and then: {error}") from cause

    def _busy(self) -> str:
        return (f"another run shapes {self._interface}, or one was killed and the device restores itself "
                f"soon; sh {STATE}/{self._interface}/restore does so now")


_SYSTEMD = "[ -d /run/systemd/system ]"
_RESTORE_IF_PRESENT = '[ ! -e "$1" ] || exec sh "$0"'  # given the restore script and the run's file


def _comparable(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["kind"], entry["handle"], entry.get("parent"), entry.get("root")


class RemoteShaping:
    """Restores all boards on exit; each restores itself after ``restore_after_s`` s without ``renew``."""

    def __init__(self, inventory: Inventory, restore_after_s: int = 300) -> None:
        self._inventory = inventory
        self._boards = [
            DeviceShaping(runner_for(inventory, device), inventory.interface(device),
                          protected_ports(inventory), restore_after_s)
            for device in inventory.device]
        self._undo = ExitStack()

    def start(self) -> None:
        """Check every board and arm its restore timer before shaping any."""
        try:
            for board in self._boards:
                board.start()
                self._undo.callback(board.restore)
        except BaseException:
            self.restore()
            raise

    def apply(self, mbps: float | None) -> None:
        """Limit every board to ``mbps`` (10^6 bit/s of Ethernet frames); None: unshaped."""
        for board in self._boards:
            board.apply(mbps)

    def renew(self) -> None:
        """Restart all restore timers; FlowspecError if one has expired."""
        for board in self._boards:
            board.renew()

    def measure(self, seconds: float = 1.0) -> list[LinkRate]:
        """Every link of the pipeline: D0 to V1, V1 to V2, … VN to D0."""
        ring = [self._inventory.draft, *self._inventory.verify, self._inventory.draft]
        return [measure_between(self._inventory, source, target, seconds)
                for source, target in pairwise(ring)]

    def restore(self) -> None:
        """Restore every board, then FlowspecError for one that cannot be reached; idempotent."""
        self._undo.close()

    def __enter__(self) -> RemoteShaping:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()
