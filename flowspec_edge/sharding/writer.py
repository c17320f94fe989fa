"""A safetensors file written piece by piece.

The library writes whole tensors from memory.  Here the header comes first, from names, shapes and dtypes,
and then rows, a few MB at a time and of several tensors in turn.  Knows the file format; a file appears
under its name when it is whole.  Does not know what tensors mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from flowspec_edge.sharding.files import Progress, partial_of, publish, writing

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8  # of the header's end: wide dtypes come first, so that every tensor is aligned to its own


class TensorFile:
    """Writes ``path``; leave the ``with`` block without an exception and the file is there, synced.

    tensors  name -> shape and dtype.  Rows of a tensor come in order, tensors in any.
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

        ValueError for rows that do not belong there: a mistake of the caller.
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
                publish(self._path)
        finally:
            self._discard()

    def _discard(self) -> None:
        """Close the file; it goes, too, unless it has been published."""
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
    """Bytes that a file of these tensors takes."""
    header, _, ends = _header(tensors)
    return max(ends.values(), default=len(header))


def _header(tensors: Layout) -> tuple[bytes, dict[str, int], dict[str, int]]:
    """The file's first bytes; where each tensor begins and ends in the file."""
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
