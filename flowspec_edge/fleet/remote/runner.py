"""Runs a command on a device; a failure becomes one line."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import IO, Protocol

from flowspec_edge.errors import FlowspecError

SBIN = "/usr/sbin:/sbin"  # ip and tc; may be missing in an ordinary user's PATH
# tar's last line has no cause; the line before has.
_NO_CAUSE = ("tar: Exiting with failure status", "tar: Error is not recoverable")


class Unreached(FlowspecError):
    """No answer: ssh failed, or the command exceeded its deadline."""


class Runner(Protocol):
    where: str  # the device's name in error messages

    def command(self, argv: Sequence[str]) -> list[str]:
        """The local command that runs ``argv`` on the device, with stdin and stdout connected."""

    def run(self, argv: Sequence[str], stdin: str | IO[bytes] | None = None) -> str:
        """The stdout of ``argv``; ``stdin``: a text or an open file.

        FlowspecError, with the last line of stderr, if it cannot be started or fails; Unreached if ssh fails
        or the command exceeds the deadline.
        """


class LocalRunner:
    """``prefix`` goes before each command, such as nsenter with its options."""

    def __init__(self, where: str = "this machine", prefix: Sequence[str] = (),
                 timeout_s: float = 60.0) -> None:
        self.where = where
        self._prefix = list(prefix)
        self._timeout_s = timeout_s

    def command(self, argv: Sequence[str]) -> list[str]:
        return [*self._prefix, *argv]

    def run(self, argv: Sequence[str], stdin: str | IO[bytes] | None = None) -> str:
        return finish(self.where, argv[0], self.command(argv), stdin, self._timeout_s)


def finish(where: str, name: str, argv: Sequence[str], stdin: str | IO[bytes] | None, timeout_s: float
           ) -> str:
    """Run ``argv`` locally; its stdout.  Errors begin with ``where`` and ``name``, or with ssh if ssh
    failed."""
    env = {**os.environ, "PATH": search_path()}
    try:
        if stdin is None or isinstance(stdin, str):
            done = subprocess.run(argv, input=(stdin or "").encode(), capture_output=True, timeout=timeout_s,
                                  check=False, env=env)
        else:
            done = subprocess.run(argv, stdin=stdin, capture_output=True, timeout=timeout_s, check=False,
                                  env=env)
    except OSError as error:
        raise FlowspecError(f"{where}: cannot run {argv[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Unreached(f"{where}: {name} did not finish within {timeout_s:g} s: see whether the board hangs "
                        "(uptime, dmesg), then run this again") from error
    if done.returncode:
        kind = Unreached if _by_ssh(argv, done.returncode) else FlowspecError
        raise kind(f"{where}: " + failure(name, argv, done.returncode, done.stderr.decode(errors="replace")))
    return done.stdout.decode(errors="replace")


def failure(name: str, argv: Sequence[str], code: int, stderr: str) -> str:
    """How a command failed, as the end of a sentence; parameters as for ``finish``."""
    if _by_ssh(argv, code):
        name = "ssh"
    prefix = "" if name == "sh" else f"{name}: "  # a script's commands name themselves
    return prefix + (last_line(stderr).removeprefix(prefix) or f"exit code {code}")


def _by_ssh(argv: Sequence[str], code: int) -> bool:
    return code == 255 and argv[0] == "ssh"


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines())
                 if line.strip() and not line.startswith(_NO_CAUSE)), "")


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SBIN}"


def as_root(argv: Sequence[str]) -> list[str]:
    """``argv`` as root: by sudo without a password, unless the user is root."""
    return ["sh", "-c", '[ "$(id -u)" = 0 ] || set -- sudo -n -- "$@"; exec "$@"', "sh", *argv]


def missing_tools(packages: Iterable[tuple[str, str]]) -> list[str]:
    """Of (tool, Debian package), the tools that this machine lacks, each with its package."""
    return [f"{tool} (Debian package {package})" for tool, package in packages
            if shutil.which(tool, path=search_path()) is None]
