"""A board as the steps in ``deploy/steps`` see it.

Knows how a step asks, does and sends something, in earnest or in a dry run, and how its result is told.
Does not know what the steps are for.  Belongs to the engine's process: pyinfra is imported here.
"""

from __future__ import annotations

import hashlib
import io
import shlex
import tarfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.facts import FactBase
from pyinfra.api.host import Host
from pyinfra.context import ctx_host
from pyinfra.operations import server

from flowspec_edge.fleet.desired import BoardState
from flowspec_edge.fleet.engine_ssh import OpenSsh

_MASK = "umask 022"  # whatever root's is there: the services' user has to read what is made


class StepFailed(Exception):
    """A step did not succeed; its text is one line, which says why."""


class Lines(FactBase[list[str]]):
    """What a shell script, which must only look, writes."""

    default = list

    @staticmethod
    def command(script: str) -> str:
        """The fact's command is the script itself."""
        return script

    def process(self, output: list[str]) -> list[str]:
        """The lines as they are."""
        return list(output)


class Board:
    """One board: ``state`` is what it is to be like.

    Every method that changes something takes the step's name, and does nothing in a dry run but tell
    that it would.  Each raises StepFailed.
    """

    def __init__(self, state: BoardState, host: Host, dry_run: bool,
                 tell: Callable[[str, bool], None]) -> None:
        self.state, self.dry_run = state, dry_run
        self.step = "connect"  # what is being done, for whoever reports a failure
        self._host, self._tell = host, tell
        assert isinstance(host.connector, OpenSsh)
        self._ssh = host.connector

    def ask(self, script: str) -> list[str]:
        """The lines that ``script``, run as root, writes; it must change nothing."""
        return list(self.fact(Lines, script=script))

    def digests(self, directory: str, which: str = "") -> dict[str, str]:
        """The files below a directory of the board's, without links: path -> SHA-256; {} if there is none.

        ``which``: find's conditions.
        """
        found = {}
        for line in self.ask(f"cd {quote(directory)} 2>/dev/null && find . {which} -type f -printf '%P\\0' | "
                             "xargs -0r sha256sum -- || true"):
            digest, path = line.split(maxsplit=1)
            found[path] = digest
        return found

    def fact(self, fact: type[FactBase[Any]], **arguments: Any) -> Any:
        """A pyinfra fact about the board."""
        with ctx_host.use(self._host):
            return self._guarded(lambda: self._host.get_fact(fact, **arguments, _sudo=not self._ssh.root))

    def do(self, step: str, operation: Callable[..., Any], **arguments: Any) -> bool:
        """A pyinfra operation, which finds out itself what there is to do; whether it changed anything."""
        self.step = step
        with ctx_host.use(self._host):
            meta = self._guarded(lambda: operation(name=step, _sudo=not self._ssh.root, **arguments))
        changed = bool(meta.will_change if self.dry_run else meta.did_change())
        self._tell(step, changed)
        return changed

    def run(self, step: str, commands: Sequence[str], why: Callable[[], str] | None = None) -> bool:
        """Shell ``commands`` as root, if there are any; ``why`` finds a failure's cause where the command
        itself does not say it.  Whether there were any."""
        if not commands:
            return self.unchanged(step)
        self.step = step
        try:
            return self.do(step, server.shell, commands=[f"{_MASK}; {line}" for line in commands])
        except StepFailed as error:
            raise StepFailed((why() if why else "") or str(error)) from error

    def unchanged(self, step: str) -> bool:
        """There is nothing to do for this step."""
        self.step = step
        self._tell(step, False)
        return False

    def send(self, step: str, directory: Path, names: Sequence[str], command: str) -> bool:
        """A tar archive of files of a directory here, as the stdin of ``command`` there."""
        return self._send(step, bool(names), lambda: ["tar", "-C", str(directory), "-cf", "-", "--", *names],
                          command)

    def send_texts(self, step: str, files: Mapping[str, str], command: str) -> bool:
        """A tar archive with such files, root's, mode 0644, as the stdin of ``command`` there."""
        return self._send(step, True, lambda: archive(files), command)

    def _send(self, step: str, needed: bool, source: Callable[[], Sequence[str] | bytes],
              command: str) -> bool:
        self.step = step
        if needed and not self.dry_run and not self._ssh.send(source(), f"{_MASK}; {command}"):
            raise StepFailed(self._ssh.failure)
        self._tell(step, needed)
        return needed

    def _guarded(self, call: Callable[[], Any]) -> Any:
        self._ssh.failure = ""
        try:
            return call()
        except PyinfraError as error:
            raise StepFailed(self._ssh.failure or str(error)) from error


def archive(files: Mapping[str, str]) -> bytes:
    """A tar archive of ``files``, path -> text."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, text in sorted(files.items()):
            data = text.encode()
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


@cache
def sha256_of(path: Path) -> str:
    """The digest of a file here, which no step changes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def quote(*words: str) -> str:
    """Words as a shell takes them."""
    return shlex.join(words)
