"""The control host's end of a transfer: one board, asked over ssh.

Knows how questions and files travel to ``shipping_board`` there, and how it shows that the connection is
lost.  Does not know what is asked.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from fcntl import fcntl
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.commands import LocalRunner, Runner, as_root, failure, search_path
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.ssh import SshRunner, is_here

_SET_PIPE_SIZE = 1031  # Linux's F_SETPIPE_SZ
_PIECE = 1 << 20
_GRACE_S = 3.0  # for an ssh client to end


class ShippingLink:
    """A conversation with one board; a context manager.  Every error is one line that names the board."""

    def __init__(self, inventory: Inventory, device: DeviceEntry, python: str, root: bool = True) -> None:
        """Begin it.

        python  the interpreter there that has flowspec
        root    whether it has to be root's
        """
        # A connection of its own: others' bytes would be in the way, and it ends when we do.
        runner: Runner = (LocalRunner(device.name) if is_here(device) else
                          SshRunner(inventory, device, own_connection=True))
        argv = [python, "-m", "flowspec_edge.fleet.shipping_board"]
        self.name, self.where = device.name, runner.where
        self._command = runner.command(as_root(argv) if root else argv)
        self._said = TemporaryFile()  # noqa: SIM115 - closed with the rest
        self._client = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, bufsize=0,
            env={**os.environ, "PATH": search_path()}, start_new_session=True)  # Ctrl-C is for us
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._in, self._out = self._client.stdin.fileno(), os.fdopen(os.dup(self._client.stdout.fileno()))
        with suppress(OSError):  # as far as the system lets an ordinary user
            fcntl(self._in, _SET_PIPE_SIZE, _PIECE)

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        """The board's answer; FlowspecError if it cannot, or does not live to tell."""
        self.tell(do, **words)
        return self.hear()

    def tell(self, do: str, **words: Any) -> None:
        """Ask, and leave the answer to :meth:`hear`."""
        line = json.dumps({"do": do, **words}).encode() + b"\n"
        while line:
            try:
                line = line[os.write(self._in, line):]
            except BrokenPipeError:
                self.hear()  # why, the board will have said
                raise self._lost() from None

    def hear(self) -> dict[str, Any]:
        """The next answer."""
        line = self._out.readline()
        if not line.endswith("\n"):
            raise self._lost()
        try:
            answer = json.loads(line)
        except ValueError:
            raise FlowspecError(f"{self.where}: {line.strip()[:100]!r} came instead of an answer: see what "
                                "writes that there, such as a shell's start-up file") from None
        if "error" in answer:
            raise FlowspecError(f"{self.where}: {answer['error']}")
        return dict(answer)

    def put(self, path: str, source: Path, offset: int, size: int, progress: Callable[[int], None]) -> bool:
        """Send the file ``source`` of ``size`` bytes from ``offset`` on; whether it is whole there.

        ``progress`` is called with the bytes that have left since the last call.
        """
        try:
            with source.open("rb") as file:
                there = os.fstat(file.fileno()).st_size
                if there != size:
                    raise FlowspecError(f"{source} has {there} bytes, and its manifest says {size}: "
                                        "shard the model again")
                self.tell("put", path=path, offset=offset)
                while offset < size:
                    count = os.sendfile(self._in, file.fileno(), offset, min(_PIECE, size - offset))
                    if not count:
                        raise FlowspecError(f"{source} has become shorter while it was sent")
                    offset += count
                    progress(count)
        except BrokenPipeError:
            self.hear()
            raise self._lost() from None
        except OSError as error:
            raise FlowspecError(f"cannot read {source}: {error.strerror}") from error
        return bool(self.hear()["whole"])

    def end(self) -> None:
        """End the connection at once, from whichever thread: the one that uses it hears that it is lost."""
        self._client.terminate()

    def close(self) -> None:
        """End the conversation."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.close()
        try:
            self._client.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._client.kill()
            self._client.wait()
        self._client.stdout.close()
        self._out.close()
        self._said.close()

    def __enter__(self) -> ShippingLink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lost(self) -> FlowspecError:
        with suppress(subprocess.TimeoutExpired):
            self._client.wait(_GRACE_S)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace")
        code = self._client.returncode
        if code is None or (code == 255 and not said.strip()):  # so ssh says that a command was killed
            return FlowspecError(f"{self.where}: the transfer was cut off; it goes on with the next one")
        return FlowspecError(f"{self.where}: {failure('the transfer', self._command, code, said)}")
