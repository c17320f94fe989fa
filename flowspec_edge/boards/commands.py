"""Runs commands on a board, here or over ssh; a failure becomes one line.

ssh is the system's OpenSSH client, with the user's configuration, keys and jump hosts.  Its options override
that configuration, so none is given for what the user may have set there.

A board may hang at any moment: while it lets the user in, in the shell's start-up files, in the command.  So
a command over ssh begins with a line that says so, and its input is sent after that line: the login and the
command have a time limit each, and what a start-up file prints or reads is neither output nor input.
"""

from __future__ import annotations

import mmap
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

from flowspec_edge.boards.inventory import DeviceEntry, Inventory, Unreached, addresses_of
from flowspec_edge.errors import FlowspecError, ended
from flowspec_edge.util.interfaces import ipv4_addresses
from flowspec_edge.util.urls import place_of

_Board = TypeVar("_Board")
_Result = TypeVar("_Result")
TIMEOUT_S = 60.0
_GRACE_S = 3.0  # for a process to end
_CONNECT_S = 10
_ALIVE_S = 5  # between keep-alives; three may be missed
_LOGIN_S = 20.0  # after the connection, until a command begins
_SSH_PORT = 22
BEGUN = "\x1eflowspec begins\x1e"  # a line of its own; no start-up file prints it
# A line of stderr: what a board is about to do, and how many seconds that may take.
_DOING = re.compile(r"^\x1e([\d.]+) (.+)$", re.MULTILINE)
_PIECE = 1 << 20  # bytes of one write
_LOOK_S = 0.5
_MOST_NOISE = 4096  # bytes
SBIN = "/usr/sbin:/sbin"  # ip and tc; may be missing in an ordinary user's PATH
# tar's last line has no cause; the line before has.
_NO_CAUSE = ("tar: Exiting with failure status", "tar: Error is not recoverable", "\x1e")
_Waits = dict[int, tuple[str, float]]
_waits: _Waits = {}
_waits_lock = threading.Lock()


class Runner(ABC):
    login_s: float | None = None  # until a command begins; None: it begins at once

    def __init__(self, device_name: str, timeout_s: float) -> None:
        """Set up commands on one device.

        device_name  the device's name in error messages
        timeout_s    for a command, or for each thing that it says it is doing (``onboard.tools.doing``) unless that
                     says how long it may take
        """
        self.device_name, self._timeout_s = device_name, timeout_s

    @abstractmethod
    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the local command that runs ``argv`` on the device, with stdin and stdout connected."""

    def announced(self, argv: Sequence[str]) -> list[str]:
        """Return ``command`` of ``argv``; over ssh it prints ``BEGUN`` before ``argv`` runs, for ``await_begin``."""
        if self.login_s is None:
            return self.command(argv)
        return self.command(["sh", "-c", f'echo; echo "{BEGUN}"; exec "$@"', "sh", *argv])

    def await_begin(self, stdout: int) -> None:
        """Read ``stdout`` up to the line that ``announced`` prints, or to its end.

        Raise Unreached if neither comes in time.
        """
        if self.login_s is None:
            return
        received, deadline = b"", time.monotonic() + self.login_s
        ready = select.poll()
        ready.register(stdout, select.POLLIN)
        while not received.endswith(f"{BEGUN}\n".encode()):
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise self.hangs_at_login(received)
            # One byte at a time, as what comes after the line is the command's.
            if not (more := os.read(stdout, 1)):
                return
            received = received[-_MOST_NOISE:] + more

    def hangs_at_login(self, output: bytes) -> Unreached:
        """Return the error for a command that has not begun; ``output`` is what came instead."""
        last = last_line(output.decode(errors="replace"))
        return Unreached(
            f"{self.device_name}: ssh reaches it, and no command began within {self.login_s:g} s"
            + (f"; it printed {last[:100]!r} last" if last else "")
            + ": see what stops its login, such as a home directory that does not answer, a full disk, "
              "~/.bashrc, or a command that sshd forces; ssh there by hand shows it")

    def run(self, argv: Sequence[str], stdin: str | IO[bytes] | None = None) -> str:
        """Run ``argv`` on the device and return its stdout; ``stdin`` is a text or an open file.

        Raise FlowspecError, with the last line of stderr, if the command cannot be started or fails.  Raise Unreached
        if ssh fails or the board exceeds a time limit.
        """
        name, local = argv[0], self.announced(argv)
        try:
            with TemporaryFile() as stderr, _waiting_for(self.device_name):
                code, stdout = self._exchange(name, local, stdin, stderr)
                stderr.seek(0)
                errors = stderr.read().decode(errors="replace")
        except OSError as error:
            raise FlowspecError(f"{self.device_name}: cannot run {local[0]}: {error.strerror}") from error
        if code and by_ssh(local, code):
            raise Unreached(f"{self.device_name}: " + (
                failure(name, local, code, errors) if last_line(errors) else
                f"ssh: the connection broke in {name}: see whether the board is up, its power and its "
                "cable, then run this again"))
        if code:
            raise FlowspecError(f"{self.device_name}: {failure(name, local, code, errors)}")
        return stdout.decode(errors="replace")

    def _exchange(self, name: str, local: Sequence[str], stdin: str | IO[bytes] | None, stderr: IO[bytes]
                  ) -> tuple[int, bytes]:
        """Run ``local`` with ``stdin``; return its exit code and stdout."""
        with subprocess.Popen(local, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, bufsize=0,
                              env={**os.environ, "PATH": search_path()}) as client:
            try:
                assert client.stdout is not None
                self.await_begin(client.stdout.fileno())
                payload: Any = ((stdin or "").encode() if stdin is None or isinstance(stdin, str)
                                else mmap.mmap(stdin.fileno(), 0, access=mmap.ACCESS_READ))
                # Not communicate's input: after a time limit it would never write the rest.
                threading.Thread(target=_feed, args=(client.stdin, payload), daemon=True).start()
                client.stdin = None
                doing, limit, since = "", self._timeout_s, time.monotonic()
                while True:
                    with suppress(subprocess.TimeoutExpired):
                        stdout, _ = client.communicate(timeout=_LOOK_S)
                        return client.returncode, stdout
                    announced_steps = _DOING.findall(os.pread(stderr.fileno(), 1 << 20, 0).decode(errors="replace"))
                    if announced_steps and announced_steps[-1][1] != doing:
                        doing, limit, since = announced_steps[-1][1], float(announced_steps[-1][0]), time.monotonic()
                    if time.monotonic() - since > limit:
                        raise Unreached(
                            f"{self.device_name}: {name} did not finish within {limit:g} s"
                            + (f"; the last that it did was: {doing}" if doing else "")
                            + ": see whether the board hangs (uptime, dmesg), then run this again")
            except BaseException:
                client.kill()
                raise


def _feed(stdin: IO[bytes], payload: Any) -> None:
    """Write ``payload`` to a command, which may end without reading all of it, and close its stdin."""
    with suppress(OSError), stdin, memoryview(payload) as view:
        sent_bytes = 0
        while sent_bytes < len(view):
            sent_bytes += os.write(stdin.fileno(), view[sent_bytes : sent_bytes + _PIECE])


class LocalRunner(Runner):
    """A runner on this machine; ``prefix`` goes before each command, such as nsenter with its options."""

    def __init__(self, device_name: str = "this machine", prefix: Sequence[str] = (),
                 timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(device_name, timeout_s)
        self._prefix = list(prefix)

    def command(self, argv: Sequence[str]) -> list[str]:
        return [*self._prefix, *argv]


@contextmanager
def _waiting_for(board: str) -> Iterator[None]:
    call = threading.get_ident()
    with _waits_lock:
        _waits[call] = board, time.monotonic()
    try:
        yield
    finally:
        with _waits_lock:
            del _waits[call]


def waited_for() -> list[tuple[str, float]]:
    """Return the boards that are being waited for, and for how many seconds, the longest first."""
    with _waits_lock:
        waits = sorted(_waits.values(), key=lambda wait: wait[1])
    return [(board, time.monotonic() - since) for board, since in waits]


def failure(name: str, argv: Sequence[str], code: int, stderr: str) -> str:
    """Return how the command ``name``, run as the local ``argv``, failed: the end of a sentence."""
    if argv[0] == "ssh" and code < 0:
        return f"ssh: the connection is lost: its client on this machine was {ended(code)}"
    if by_ssh(argv, code):
        if not last_line(stderr):  # so ssh ends after lost keep-alives, and if the program was killed
            return (f"ssh: the connection was lost, or {name} was killed on the board: see the board's "
                    "kernel log (dmesg)")
        name = "ssh"
    prefix = "" if name == "sh" else f"{name}: "  # a script's commands name themselves
    return prefix + (last_line(stderr).removeprefix(prefix) or ended(code))


def by_ssh(argv: Sequence[str], code: int) -> bool:
    """Return whether the local command ``argv``, which ended with ``code``, failed as ssh did."""
    return argv[0] == "ssh" and (code == 255 or code < 0)


def last_line(text: str) -> str:
    # splitlines would part a line at \x1e, too, with which the lines begin that are no cause.
    return next((line.strip() for line in reversed(re.split(r"[\r\n]+", text))
                 if line.strip() and not line.startswith(_NO_CAUSE)), "")


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SBIN}"


def as_root(argv: Sequence[str]) -> list[str]:
    """Return the command for ``argv`` as root: by sudo without a password, unless the user is root."""
    return ["sh", "-c", '[ "$(id -u)" = 0 ] || set -- sudo -n -- "$@"; exec "$@"', "sh", *argv]


def on_each(function: Callable[[_Board], _Result], boards: Sequence[_Board]) -> list[_Result]:
    """Call ``function`` for all boards at once; return the results in the boards' order."""
    with ThreadPoolExecutor(max(1, len(boards))) as pool:
        return list(pool.map(function, boards))


def end_process(client: subprocess.Popen[bytes]) -> None:
    """Wait for a process that has been told to end, and kill it if it does not."""
    try:
        client.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        client.kill()
        client.wait()  # no deadline: SIGKILL ends it


def missing_tools(packages: Iterable[tuple[str, str]]) -> list[str]:
    """Return the tools that this machine lacks, each with its package; ``packages``: (tool, Debian package)."""
    return [f"{tool} (Debian package {package})" for tool, package in packages
            if shutil.which(tool, path=search_path()) is None]


class SshRunner(Runner):
    """A runner over ssh, which never prompts: a password or an unknown host key is an error."""

    def __init__(self, inventory: Inventory, device: DeviceEntry, timeout_s: float = TIMEOUT_S,
                 own_connection: bool = False) -> None:
        """Set up ssh to ``device``.

        own_connection  no ControlMaster sharing, so that the remote sshd ends with this command
        """
        super().__init__(device.label, timeout_s)
        configured = _configured(inventory, device)
        # Nothing can be asked; a command or forwardings of the user's are for a terminal.
        options: dict[str, str | int] = {"BatchMode": "yes", "LogLevel": "ERROR", "RemoteCommand": "none",
                                         "ClearAllForwardings": "yes"}
        connect = configured.get("connecttimeout", "none")
        if not connect.isdigit():
            options["ConnectTimeout"] = _CONNECT_S
        if configured.get("serveraliveinterval", "0") == "0":
            options |= {"ServerAliveInterval": _ALIVE_S, "ServerAliveCountMax": 3}
        if own_connection:
            options["ControlPath"] = "none"
        self.login_s = _LOGIN_S + (int(connect) if connect.isdigit() else _CONNECT_S)
        self._ssh = ["ssh", "-T", *_file_options(inventory, device), *_as_options(options), "--", device.address]

    def command(self, argv: Sequence[str]) -> list[str]:
        # exec makes the program a child of sshd, so that it ends with the connection.
        return [*self._ssh, f"exec {shlex.join(argv)}"]

    def connecting(self, host: str, port: int) -> list[str]:
        """Return the local command whose stdin and stdout are a TCP connection from the board to ``host``."""
        *options, end, address = self._ssh
        return [*options, "-W", place_of(host, port), end, address]


def _file_options(inventory: Inventory, device: DeviceEntry) -> list[str]:
    """Return the arguments for what the cluster file says of ssh; the user's configuration decides the rest."""
    options: dict[str, str | int] = {}
    if device.ssh_port:
        options["Port"] = device.ssh_port
    if device.ssh_user:
        options["User"] = device.ssh_user
    if device.ssh_key:
        options |= {"IdentityFile": device.ssh_key, "IdentitiesOnly": "yes"}
    file = ["-F", inventory.cluster.ssh_config] if inventory.cluster.ssh_config else []
    return [*file, *_as_options(options)]


def _as_options(options: Mapping[str, str | int]) -> list[str]:
    return [part for key, value in options.items() for part in ("-o", f"{key}={value}")]


def _configured(inventory: Inventory, device: DeviceEntry) -> dict[str, str]:
    """Return what ssh would use for the board, by the option's name in lower case.

    The options come from the cluster file, the user's configuration and ssh's defaults.  Empty if ssh cannot say,
    which the connection then explains.
    """
    try:
        completed = subprocess.run(["ssh", "-G", *_file_options(inventory, device), "--", device.address],
                                   stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                                   timeout=_CONNECT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition(" ") for line in completed.stdout.splitlines())
    return {key: value for key, _, value in pairs}


def ssh_port(inventory: Inventory, device: DeviceEntry) -> int:
    """Return the port of the board's sshd, by the cluster file, else by the user's configuration."""
    return device.ssh_port or int(_configured(inventory, device).get("port", _SSH_PORT))


def protected_ports(inventory: Inventory) -> list[int]:
    """Return the TCP ports with priority on shaped links: the control channel's and ssh's."""
    return sorted({inventory.cluster.control_port,
                   *(ssh_port(inventory, device) for device in inventory.device)})


def runner_for(inventory: Inventory, device: DeviceEntry, timeout_s: float = TIMEOUT_S,
               own_connection: bool = False) -> Runner:
    if is_here(inventory, device):
        return LocalRunner(device.name, timeout_s=timeout_s)
    return SshRunner(inventory, device, timeout_s, own_connection)


def python_for(inventory: Inventory, device: DeviceEntry) -> str:
    """Return the interpreter for ``runner_for``: ``sys.executable`` if ``device`` is this machine.

    A name that does not resolve is no error here: the command that the interpreter is for names the board.
    """
    with suppress(Unreached):
        if is_here(inventory, device):
            return sys.executable
    return inventory.python(device)


def is_here(inventory: Inventory, device: DeviceEntry) -> bool:
    """Return whether ``device`` is this machine, which needs no ssh: one of its addresses is an interface's.

    False for another ssh port than 22, which may be forwarded from an address of this machine to another one.
    Raise Unreached if the device's name does not resolve.
    """
    return has_address_of(device) and ssh_port(inventory, device) == _SSH_PORT


def has_address_of(device: DeviceEntry) -> bool:
    """Return whether an address of ``device`` is one of this machine's; raise Unreached as ``is_here`` does."""
    local_addresses = {address for addresses in ipv4_addresses().values() for address in addresses}
    return any(address in local_addresses or IPv4Address(address).is_loopback for address in addresses_of(device))
