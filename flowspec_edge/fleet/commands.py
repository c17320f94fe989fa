"""Running one command on a device and turning its failure into one line.

Knows how a command is started here, inside a namespace or as root, and how it says that it failed.
Does not know what the commands are for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import Protocol

from flowspec_edge.errors import FlowspecError

SBIN = "/usr/sbin:/sbin"  # where ip and tc live, and what an ordinary user's PATH may lack


class Runner(Protocol):
    """Runs commands on one device."""

    where: str  # the device, for error messages

    def command(self, argv: Sequence[str]) -> list[str]:
        """What to start on this machine so that ``argv`` runs there, with its stdin and stdout."""

    def run(self, argv: Sequence[str], stdin: str | None = None) -> str:
        """What ``argv`` writes to stdout, given ``stdin``.

        FlowspecError, with the last line it wrote to stderr, if it cannot be run or fails.
        """


class LocalRunner:
    """Runs commands on this machine; ``prefix`` goes before each, such as nsenter with its options."""

    def __init__(self, where: str = "this machine", prefix: Sequence[str] = (),
                 timeout_s: float = 60.0) -> None:
        self.where = where
        self._prefix = list(prefix)
        self._timeout_s = timeout_s

    def command(self, argv: Sequence[str]) -> list[str]:
        """See :class:`Runner`."""
        return [*self._prefix, *argv]

    def run(self, argv: Sequence[str], stdin: str | None = None) -> str:
        """See :class:`Runner`."""
        return finish(self.where, argv[0], self.command(argv), stdin, self._timeout_s)


def finish(where: str, name: str, argv: Sequence[str], stdin: str | None, timeout_s: float) -> str:
    """Run ``argv`` on this machine to its end; its stdout.

    FlowspecError that begins with ``where`` and ``name``, the command as the user knows it; where
    ssh itself failed, which exits with 255, with that instead.
    """
    try:
        done = subprocess.run(
            argv, input=stdin or "", capture_output=True, text=True, errors="replace", timeout=timeout_s,
            check=False, env={**os.environ, "PATH": search_path()})
    except OSError as error:
        raise FlowspecError(f"{where}: cannot run {argv[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise FlowspecError(f"{where}: {name} has not ended within {timeout_s:g} s") from error
    if done.returncode:
        raise FlowspecError(f"{where}: " + failure(name, argv, done.returncode, done.stderr))
    return done.stdout


def failure(name: str, argv: Sequence[str], code: int, stderr: str) -> str:
    """How a command failed, as the end of a sentence; the parameters as those of :func:`finish`."""
    if code == 255 and argv[0] == "ssh":
        name = "ssh"
    prefix = "" if name == "sh" else f"{name}: "  # a script's own commands say who they are
    return prefix + (last_line(stderr).removeprefix(prefix) or f"exit code {code}")


def last_line(text: str) -> str:
    """The last line of ``text`` that says anything."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def search_path() -> str:
    """PATH, and where the system's own tools are."""
    return f"{os.environ.get('PATH', os.defpath)}:{SBIN}"


def as_root(argv: Sequence[str]) -> list[str]:
    """``argv`` as root: by sudo, which must not ask for a password, unless whoever runs it is root."""
    return ["sh", "-c", '[ "$(id -u)" = 0 ] || set -- sudo -n -- "$@"; exec "$@"', "sh", *argv]


def missing_tools(packages: Iterable[tuple[str, str]]) -> list[str]:
    """Of (tool, Debian package) those tools that this machine lacks, each with its package."""
    return [f"{tool} (Debian package {package})" for tool, package in packages
            if shutil.which(tool, path=search_path()) is None]
