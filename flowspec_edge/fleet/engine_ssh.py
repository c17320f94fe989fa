"""How the engine's process reaches a board: the system's OpenSSH client, below pyinfra.

Knows one connection to each board, shared by all its commands, and what the last command that failed
had to say.  Does not know what is run.  OpenSSH rather than pyinfra's own client, so that a board is
reached here exactly as everywhere else: the same configuration, host keys, agents and jump hosts.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from gevent import subprocess
from pyinfra.api.command import StringCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.connectors.base import BaseConnector
from pyinfra.connectors.util import CommandOutput, OutputLine, make_unix_command_for_host

from flowspec_edge.fleet.commands import last_line
from flowspec_edge.fleet.desired import Reach
from flowspec_edge.fleet.openssh import is_own, openssh

# Its end is the connection's: the board sees it when this process is gone, however that came.
_HOLD = "id -u && exec cat"
_ONLY_THAT = ("tar: Exiting with failure status", "tar: Error is not recoverable")


class OpenSsh(BaseConnector):
    """pyinfra's way to one board; the host's data has ``reach``."""

    handles_execution = True

    def __init__(self, state: State, host: Host) -> None:
        super().__init__(state, host)
        self.reach: Reach = host.data.reach
        self.failure = ""  # what the last command that failed said
        self.root = False  # whether commands run as root without more
        self._here = is_own(self.reach.address)
        self._directory = ""
        self._master: subprocess.Popen[bytes] | None = None

    @staticmethod
    def make_names_data(name: str) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
        """Boards come from the rollout, not from names."""
        yield name, {}, []

    def connect(self) -> None:
        """Open the connection; ConnectError says in ssh's words why not."""
        self._directory = tempfile.mkdtemp(prefix="flowspec-")
        command = ["sh", "-c", _HOLD] if self._here else [*self._ssh("yes"), _HOLD]
        with open(Path(self._directory, "error"), "w+b") as said:
            self._master = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=said)
            assert self._master.stdout is not None
            user = self._master.stdout.readline().strip()
            if not user.isdigit():
                code = self._master.wait()
                said.seek(0)
                text = said.read().decode(errors="replace")
                raise ConnectError(last_line(text).removeprefix("ssh: ") or f"ssh: exit code {code}")
        self.root = user == b"0"
        if not self.root and not self._finish("sudo -n true")[0]:
            name = self.reach.user or "the user there"
            raise ConnectError(f"{name} is not root and cannot become it: {self.failure}")

    def disconnect(self) -> None:
        """End the connection, and with it what still runs there for it."""
        if self._master is not None:
            self._master.kill()
            self._master.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def run_shell_command(self, command: StringCommand, print_output: bool = False,
                          print_input: bool = False, **arguments: Any) -> tuple[bool, CommandOutput]:
        """See :class:`BaseConnector`; what it prints is returned, never shown."""
        for key in ("_get_pty", "_timeout", "_success_exit_codes"):
            arguments.pop(key, None)
        stdin = arguments.pop("_stdin", None)
        line = make_unix_command_for_host(self.state, self.host, command, **arguments).get_raw_value()
        done, out, err = self._finish(line, (stdin or "").encode())
        lines = [OutputLine(name, line) for name, text in (("stdout", out), ("stderr", err))
                 for line in text.splitlines()]
        return done, CommandOutput(lines)

    def send(self, source: Sequence[str] | bytes, command: str) -> bool:
        """Give ``command``, run as root there, what the command ``source`` here writes, or its bytes."""
        line = f"sh -c {shlex.quote(command)}" if self.root else f"sudo -n sh -c {shlex.quote(command)}"
        if isinstance(source, bytes):
            return self._finish(line, source)[0]
        with subprocess.Popen(source, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as here:
            assert here.stdout is not None
            done = self._finish(line, here.stdout)[0]
            here.stdout.close()
            if here.wait() and done:
                self.failure = f"{source[0]}: exit code {here.returncode}"
                return False
        return done

    def put_file(self, *_: Any, **__: Any) -> bool:
        """No step needs it: files go as archives, by :meth:`send`."""
        raise OSError("this connection has no single files")

    def get_file(self, *_: Any, **__: Any) -> bool:
        """See :meth:`put_file`."""
        raise OSError("this connection has no single files")

    def _finish(self, line: str, stdin: bytes | IO[bytes] = b"") -> tuple[bool, str, str]:
        command = ["sh", "-c", line] if self._here else [*self._ssh("no"), line]
        source = subprocess.PIPE if isinstance(stdin, bytes) else stdin
        with subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:
            raw = process.communicate(stdin if isinstance(stdin, bytes) else None)
        out, err = (part.decode(errors="replace") for part in raw)
        if process.returncode:
            who = "ssh: " if process.returncode == 255 and not self._here else ""
            self.failure = who + (_cause(err) or _cause(out) or f"exit code {process.returncode}")
        return process.returncode == 0, out, err

    def _ssh(self, master: str) -> list[str]:
        return openssh(self.reach, {"ControlMaster": master, "ControlPath": f"{self._directory}/ssh",
                                    "ControlPersist": "no"})


def _cause(text: str) -> str:
    """The last line that says what is wrong, and not merely that something is."""
    return last_line("\n".join(line for line in text.splitlines() if not line.startswith(_ONLY_THAT)))
