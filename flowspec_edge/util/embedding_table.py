"""Token embeddings that stay in their file: a segment's rows are read when they are looked up.

The table of a vocabulary of 152,000 tokens takes 1.6 GB at a width of 5,120, and a segment needs sixteen rows
of it. They are read with pread, not through a mapping: a file that is cut short is then an error with a name,
where a mapping would end the process with SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor, nn

from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.util.storage.weight_file import SafetensorsFile
from flowspec_edge.util.tensors import check_finite, to_device

_DTYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16


class EmbeddingTable(nn.Module):
    """In place of ``nn.Embedding``, without weights in memory.

    num_embeddings, embedding_dim  V and H
    """

    _like: Tensor  # empty; its dtype and device are those of the rows, and follow ``to``

    def __init__(self, file: SafetensorsFile, name: str, dtype: torch.dtype,
                 device: torch.device | str = "cpu") -> None:
        """Tensor ``name`` [V, H], which is read once; rows are returned in ``dtype`` on ``device``.
        FlowspecError if ``file`` does not hold it, or values that are not finite in ``dtype``."""
        super().__init__()
        self._file, self._path, info = file.file, file.path, file.info(name)
        self.register_buffer("_like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        if len(info.shape) != 2 or not info.nbytes or info.dtype not in _DTYPES:
            raise FlowspecError(f"{file.path}: tensor {name}, {info.dtype} {list(info.shape)}, is no table "
                                "of embeddings: copy the model again")
        self.num_embeddings, self.embedding_dim = info.shape
        self._stored, self._row_bytes, self._start = info.dtype, info.row_bytes, file.start(name)
        self._state = self._now()
        for _, rows in file.pieces(name):
            check_finite(rows, dtype, f"{file.path}: tensor {name}")

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows [..., H] of ``tokens`` [...], int64, which are waited for on a GPU. FlowspecError if the file
        has changed since it was opened, or cannot be read."""
        if self._now() != self._state:
            raise FlowspecError(f"{self._path} has changed while its embeddings were in use: restart with "
                                "the whole file, and replace files by renaming new ones")
        data = bytearray().join(self._rows(tokens.flatten().tolist()))
        rows = torch.frombuffer(data, dtype=self._stored) if data else torch.empty(0, dtype=self._stored)
        shape = (*tokens.shape, self.embedding_dim)
        assert rows.numel() == prod(shape)
        return to_device(rows.view(shape).to(self._like.dtype), self._like.device)

    def _rows(self, tokens: list[int]) -> Iterable[bytes]:
        for token in tokens:
            if not 0 <= token < self.num_embeddings:
                raise ProtocolError(f"token {token} is outside the vocabulary of {self.num_embeddings}")
            try:
                row = os.pread(self._file.fileno(), self._row_bytes, self._start + token * self._row_bytes)
            except OSError as error:
                raise FlowspecError(f"cannot read the embedding of token {token} from {self._path}: "
                                    f"{error.strerror}; see to the disk, then restart") from error
            if len(row) < self._row_bytes:
                raise FlowspecError(f"{self._path} was cut short while its embeddings were in use: copy the "
                                    "model again, then restart")
            yield row

    def _now(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns


Embedding = nn.Embedding | EmbeddingTable


def as_embedding(embedding: Tensor | Embedding) -> Embedding:
    """A tensor [V, H] as a module."""
    return nn.Embedding.from_pretrained(embedding) if isinstance(embedding, Tensor) else embedding


def tokens_device(embedding: nn.Module, device: torch.device) -> torch.device:
    """Where ``embedding``, whose rows go to ``device``, wants the tokens."""
    return torch.device("cpu") if isinstance(embedding, EmbeddingTable) else device
