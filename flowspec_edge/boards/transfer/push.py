"""The sending end: each board gets its part of a sharded model, all boards in parallel.

An ssh pipe instead of rsync, which took 1.5 times as long for a new file: the board hashes while it writes.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fcntl import fcntl
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from flowspec_edge import errors
from flowspec_edge.boards.commands import as_root, end_process, failure, runner_for, search_path
from flowspec_edge.boards.images.archive import FILE, Image
from flowspec_edge.boards.inventory import DeviceEntry, Inventory
from flowspec_edge.boards.paths import IMAGES, MODELS, model_dir
from flowspec_edge.boards.transfer import receive, store
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.manifest import PartFile
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.weights.located import MANIFEST
from flowspec_edge.util import files
from flowspec_edge.util.bounded_read import sha256_of
from flowspec_edge.util.interpreter import module_command, modules_program

OnBytes = Callable[[str, int, int], None]
"""Called with a board's name, how many bytes it has got in this call, and how many it is to get in all;
from several threads, one a board."""

_RECEIVER_MODULES = (errors, files, store, receive)  # the receiving end, in the order of their imports
_SET_PIPE_SIZE = 1031  # Linux's F_SETPIPE_SZ
_PIECE = 1 << 20
_GRACE_S = 3.0  # for an ssh client to exit
_SILENCE_S = 120.0  # without a byte taken or an answer: a card that writes back may stall for tens of seconds
_SLOWEST = 2e6  # bytes/s: a board that hashes or syncs a file before it answers


@dataclass(frozen=True)
class TransferResult:
    board: str
    bytes_sent: int = 0
    error: str = ""


def push(model: Path, boards: Sequence[tuple[DeviceEntry, str, str]], inventory: Inventory, *,
         progress: OnBytes = lambda board, done, total: None, models: str = MODELS,
         silence_s: float = _SILENCE_S) -> list[TransferResult]:
    """Bring the manifest and a part of ``model`` to each board; return one result per board, in order.

    boards     (board, part, interpreter with flowspec there; "": the board's own, without)
    models     the directory of models on the boards
    silence_s  how long a board may take no data and give no answer, besides the time that its data need

    Received data stays on a board, and the next call resumes.  A board's errors are in its result.

    Raise UsageError if ``model`` is not a sharded model or lacks a part.
    """
    manifest = OpenModel(model).require_manifest()
    text = (model / MANIFEST).read_text(encoding="utf-8")
    destination = {"root": models, "name": Path(model_dir(manifest.request)).name}
    return _send(model, [(device, manifest.part(part).files, python) for device, part, python in boards], inventory,
                 destination, text, progress, silence_s)


def send_image(boards: Sequence[tuple[DeviceEntry, Image]], inventory: Inventory, *,
               progress: OnBytes = lambda board, done, total: None, images: str = IMAGES,
               silence_s: float = _SILENCE_S) -> list[TransferResult]:
    """Bring the image, the same one for all, to each board: the archive; results and resumption as for ``push``.

    The board's own Python receives it.
    """
    if not boards:
        return []
    image = boards[0][1]
    archive = Path(image.archive)
    file = PartFile(path=FILE, size=image.size, sha256=sha256_of(archive))
    with TemporaryDirectory(prefix="flowspec-") as directory:  # the file by its name on the boards
        Path(directory, FILE).symlink_to(archive.resolve())
        return _send(Path(directory), [(device, [file], "") for device, _ in boards], inventory,
                     {"root": images, "name": image.tag}, "{}", progress, silence_s)


def _send(home: Path, boards: Sequence[tuple[DeviceEntry, Sequence[PartFile], str]], inventory: Inventory,
          destination: dict[str, str], text: str, progress: OnBytes, silence_s: float) -> list[TransferResult]:
    """Send files of the directory ``home`` to each board; ``text``: of the manifest that is written at the end."""
    connections: list[_Connection] = []

    def send_to_board(board: tuple[DeviceEntry, Sequence[PartFile], str]) -> TransferResult:
        device, files, python = board
        bytes_sent = 0

        def count(piece: int, total: int) -> None:
            nonlocal bytes_sent
            bytes_sent += piece
            progress(device.name, bytes_sent, total)

        try:
            connections.append(connection := _Connection(inventory, device, python, silence_s))
            with connection:
                _fill(connection, home, files, destination, count)
                connection.ask("finish", sum(file.size for file in files), manifest=text)
        except FlowspecError as error:
            return TransferResult(device.name, bytes_sent, str(error))
        return TransferResult(device.name, bytes_sent)

    with ThreadPoolExecutor(max(1, len(boards))) as pool:
        try:
            return list(pool.map(send_to_board, boards))
        except BaseException:  # Ctrl-C: the pool would wait for threads that wait for boards
            for connection in connections:
                connection.terminate()
            raise


def _fill(connection: _Connection, model: Path, files: Sequence[PartFile], destination: dict[str, str],
          count: Callable[[int, int], None]) -> None:
    answer = connection.ask("open", sum(file.size for file in files), **destination,
                            files=[[file.path, file.size, file.sha256] for file in files])
    missing: dict[str, int] = answer["missing"]
    total = sum(file.size - missing[file.path] for file in files if file.path in missing)
    if total > answer["free"]:
        raise FlowspecError(f"{connection.device_name}: no room in {destination['root']}: {_size(total)} are to be "
                            f"written and {_size(answer['free'])} are free: make room there, and run this "
                            "again")

    def progress(piece: int) -> None:
        count(piece, total)

    for file in files:
        if file.path not in missing:
            continue
        source, offset = model / file.path, missing[file.path]
        if connection.put(file, source, offset, progress):
            continue
        if sha256_of(source) != file.sha256:
            raise FlowspecError(f"{source} has been altered: its sha256 is not the one in {MANIFEST}; "
                                "shard the model again")
        total += offset  # the board's partial file was damaged
        if not offset or not connection.put(file, source, 0, progress):
            raise FlowspecError(f"{connection.device_name}: {file.path} does not arrive as it was sent: check the "
                                "board's disk and memory (dmesg), and run this again")


class _Connection:
    """A connection to ``receive`` on one board; every error is one line that names the board."""

    def __init__(self, inventory: Inventory, device: DeviceEntry, python: str, silence_s: float) -> None:
        self._silence_s = silence_s
        # Own connection: no other traffic delays it, and the board notices when it ends.
        self._runner = runner = runner_for(inventory, device, own_connection=True)
        self.device_name = runner.device_name
        program = module_command("flowspec_edge.boards.transfer.receive", python=python) if python else [
            inventory.cluster.board_python, "-I", "-c", modules_program(_RECEIVER_MODULES, receive, "main()")]
        self._command = runner.announced(as_root(program))
        self._stderr = TemporaryFile()  # noqa: SIM115 - closed with the rest
        self._client = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, bufsize=0,
            env={**os.environ, "PATH": search_path()}, start_new_session=True)  # Ctrl-C is for this process
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._in, self._out = self._client.stdin.fileno(), os.fdopen(os.dup(self._client.stdout.fileno()))
        os.set_blocking(self._in, False)
        with suppress(OSError):  # limited for ordinary users
            fcntl(self._in, _SET_PIPE_SIZE, _PIECE)

    def ask(self, do: str, size: int, **arguments: Any) -> dict[str, Any]:
        """Ask the board and return its answer.

        size  bytes that the board may have to read or sync first

        Raise FlowspecError for the board's error or a lost connection.
        """
        self._send(do, **arguments)
        return self._answer(size)

    def put(self, file: PartFile, source: Path, offset: int, progress: Callable[[int], None]) -> bool:
        """Send a file from ``offset`` on; return whether it is complete.

        ``progress`` gets the bytes since its last call.
        """
        try:
            with source.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size != file.size:
                    raise FlowspecError(f"{source} has {size} bytes, and its manifest says {file.size}: "
                                        "shard the model again")
                self._send("put", path=file.path, offset=offset)
                while offset < file.size:
                    self._wait(select.POLLOUT, self._silence_s)
                    try:
                        count = os.sendfile(self._in, stream.fileno(), offset,
                                            min(_PIECE, file.size - offset))
                    except BlockingIOError:
                        continue
                    if not count:
                        raise FlowspecError(f"{source} became shorter while it was sent")
                    offset += count
                    progress(count)
        except BrokenPipeError:
            self._answer(0)  # raises the board's error
            raise self._lost() from None
        except OSError as error:
            raise FlowspecError(f"cannot read {source}: {error.strerror}") from error
        return bool(self._answer(file.size)["complete"])

    def terminate(self) -> None:
        """End the connection from another thread, so that the thread that uses it raises."""
        self._client.terminate()

    def __enter__(self) -> _Connection:
        """Wait until the board begins; raise Unreached if it lets nothing begin."""
        try:
            self._runner.await_begin(self._out.fileno())
        except BaseException:
            self.terminate()
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.close()
        end_process(self._client)
        for file in (self._client.stdout, self._out, self._stderr):
            file.close()

    def _send(self, do: str, **arguments: Any) -> None:
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        while line:
            self._wait(select.POLLOUT, self._silence_s)
            try:
                line = line[os.write(self._in, line):]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                self._answer(0)  # raises the board's error
                raise self._lost() from None

    def _wait(self, event: int, limit_s: float) -> None:
        """Wait until the pipe to (POLLOUT) or from (POLLIN) the board is ready, or has ended."""
        ready = select.poll()
        ready.register(self._in if event == select.POLLOUT else self._out, event)
        if not ready.poll(limit_s * 1000):
            raise FlowspecError(f"{self.device_name}: the transfer has stood still for {limit_s:.0f} s: see "
                                "whether the board hangs (uptime, dmesg); the next run resumes it")

    def _answer(self, size: int) -> dict[str, Any]:
        self._wait(select.POLLIN, self._silence_s + size / _SLOWEST)
        line = self._out.readline()  # the board writes a whole line at once
        if not line.endswith("\n"):
            raise self._lost()
        try:
            answer = json.loads(line)
        except ValueError:
            raise FlowspecError(f"{self.device_name}: {line.strip()[:100]!r} came instead of an answer: check what "
                                "writes that there, such as a shell's start-up file") from None
        if "error" in answer:
            raise FlowspecError(f"{self.device_name}: {answer['error']}")
        return dict(answer)

    def _lost(self) -> FlowspecError:
        with suppress(subprocess.TimeoutExpired):
            self._client.wait(_GRACE_S)
        self._stderr.seek(0)
        errors = self._stderr.read().decode(errors="replace")
        code = self._client.returncode
        if code is None or (code == 255 and not errors.strip()):  # ssh's code for a killed command
            return FlowspecError(f"{self.device_name}: the transfer was cut off; the next run resumes it")
        return FlowspecError(f"{self.device_name}: {failure('the transfer', self._command, code, errors)}")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
