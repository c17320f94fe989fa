"""Tensors of GGUF files: read by rows, dequantised, or as the blocks that they are stored in.

A table names them as checkpoints do, and says where each is; ``model.gguf.home`` writes it, for files whose types can
all be read.  Reading needs the package gguf for types that are neither floats nor repacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.weights.gguf_types import BlockType, library
from flowspec_edge.util.bounded_read import UncachedFile, read_json_object
from flowspec_edge.util.weight_file import TensorInfo, WeightFile

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFile(WeightFile):
    """All tensors of one model, whose GGUF file may be split into several.

    One in blocks counts as float32: that is what its values are computed in.
    """

    def __init__(self, table: Path) -> None:
        """Read a GGUF file's table; FlowspecError if it cannot be read, or the file was altered since."""
        self.path = table
        table_fields = read_json_object(table)
        try:
            self._files = [_unaltered(file) for file in table_fields["files"]]
            self._types = {name: BlockType(name, *block) for name, block in table_fields["types"].items()}
            self._entries: dict[str, Mapping[str, Any]] = dict(table_fields["tensors"])
            self.tensors = {name: TensorInfo(torch.Size(entry["shape"]), _FLOATS.get(entry["type"], torch.float32))
                            for name, entry in self._entries.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise FlowspecError(f"{table} is damaged ({error!r}): delete its directory; it is made again") from error

    def rename(self, names: Mapping[str, str]) -> None:
        super().rename(names)
        self._entries = {names.get(name, name): entry for name, entry in self._entries.items()}

    def type_of(self, name: str) -> str:
        """Return how a tensor is stored: "F16", "Q4_K" and so on."""
        return str(self._entries[name]["type"])

    def is_plain(self, name: str) -> bool:
        """Whether each value is stored as a float of its own, not in a block."""
        return self.type_of(name) in _FLOATS

    def read(self, name: str, lo: int = 0, hi: int | None = None, buffer: Tensor | None = None) -> Tensor:
        info, kind = self.info(name), self.type_of(name)
        blocks = self.blocks(name, lo, info.rows if hi is None else hi)
        shape = (len(blocks), *info.shape[1:])
        if kind in _FLOATS:
            values = blocks.view(_FLOATS[kind]).view(shape)
            offset = self._entries[name].get("offset", 0.0)
            return values - offset if offset else values
        gguf = library()
        expanded = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
        return torch.from_numpy(np.ascontiguousarray(expanded, dtype=np.float32)).view(shape)

    def blocks(self, name: str, lo: int, hi: int) -> Tensor:
        """Return rows [lo, hi) as they are stored, in a checkpoint's order: uint8 [hi - lo, bytes of a row]."""
        info, entry = self.info(name), self._entries[name]
        kind = self._types[entry["type"]]
        row = max(1, prod(info.shape[1:]) // kind.values) * kind.size
        heads = entry.get("heads", 0)
        span = info.rows // heads if heads else 1  # rows of a head are permuted among themselves
        first, last = lo // span * span, -(-hi // span) * span
        data = torch.empty((last - first, row), dtype=torch.uint8)
        if data.numel():
            self._files[entry["file"]].read_into(data.numpy().data.cast("B"), entry["at"] + first * row)
        if heads:
            data = data.view(-1, span // 2, 2, row).transpose(1, 2).reshape(-1, row)[lo - first : hi - first]
        return data


def _unaltered(file_entry: Mapping[str, Any]) -> UncachedFile:
    path = Path(file_entry["path"])
    try:
        now = path.stat()
    except OSError as error:
        raise FlowspecError(f"cannot read {path}: {error.strerror}: give the GGUF file's new place as the model"
                            ) from error
    if (now.st_size, now.st_mtime_ns) != (file_entry["size"], file_entry["mtime_ns"]):
        raise FlowspecError(f"{path} has changed since it was first read: give the file as the model again")
    return UncachedFile(path)
