"""Writes safetensors files in pieces of a few MB; the library writes whole tensors from memory.

The header comes first, from names, shapes and dtypes.  A file gets its final name when complete and synced.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util.bounded_read import Progress
from flowspec_edge.util.files import PARTIAL, publish
from flowspec_edge.util.weight_file import DTYPES

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8  # of the header's end; wide dtypes come first, so every tensor is aligned to its dtype
_BLOCK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def partial_of(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a FlowspecError with advice about ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FlowspecError(f"no room to write {path} ({error.strerror}): free some space, and run the "
                                "same command again to go on") from error
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def copy_file(source: Path, path: Path, progress: Progress | None = None) -> None:
    partial = partial_of(path)
    try:
        try:
            reader = source.open("rb")
        except OSError as error:
            raise FlowspecError(f"cannot read {source}: {error.strerror}") from error
        with reader, writing(path):
            with partial.open("wb") as target:
                while block := reader.read(_BLOCK):
                    target.write(block)
                    if progress is not None:
                        progress(len(block))
                target.flush()
                os.fsync(target.fileno())
            publish(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()


class TensorFile:
    """A context manager that writes ``path``; the file appears, synced, if the block raises no exception.

    Rows of a tensor must arrive in order, tensors in any order.
    """

    def __init__(self, path: Path, tensors: Layout, progress: Progress | None = None) -> None:
        self._path, self._progress = path, progress
        header, self._at, self._end = _header(tensors)
        self._layout = dict(tensors)
        with writing(path):
            self._file = os.open(partial_of(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            with writing(path):
                self._put(header, 0)
        except BaseException:
            self._discard()
            raise

    def write(self, name: str, rows: Tensor) -> None:
        """Append rows [n, …] (or the one value of a tensor without dimensions) in the tensor's own dtype.

        ValueError for rows of another dtype or shape, or too many of them.
        """
        shape, dtype = self._layout[name]
        if rows.dtype != dtype or tuple(rows.shape[1:]) != shape[1:]:
            raise ValueError(f"{name} is {dtype} {shape}, and got {rows.dtype} {tuple(rows.shape)}")
        data = memoryview(rows.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        if self._at[name] + len(data) > self._end[name]:
            raise ValueError(f"more rows than {name} has")
        with writing(self._path):
            self._put(data, self._at[name])
        self._at[name] += len(data)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            short = [name for name, at in self._at.items() if at != self._end[name]]
            if short and kind is None:
                raise ValueError(f"rows of {short[0]} are missing")
            if kind is None:
                with writing(self._path):
                    os.fsync(self._file)
                    publish(partial_of(self._path), self._path)
        finally:
            self._discard()

    def _discard(self) -> None:
        os.close(self._file)
        with suppress(OSError):
            partial_of(self._path).unlink()

    def _put(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._file, view, at)
            view, at = view[count:], at + count
            if self._progress is not None:
                self._progress(count)


def file_size(tensors: Layout) -> int:
    header, _, ends = _header(tensors)
    return max(ends.values(), default=len(header))


def _header(tensors: Layout) -> tuple[bytes, dict[str, int], dict[str, int]]:
    """(header bytes, start of each tensor, end of each tensor)."""
    offset = 0
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name)):
        shape, dtype = tensors[name]
        begins[name], offset = offset, offset + prod(shape) * dtype.itemsize
        ends[name] = offset
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begins[name], offset]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return header, {n: start + at for n, at in begins.items()}, {n: start + at for n, at in ends.items()}
