"""GGUF's blocks: those of 4 bits repacked as grouped int4 with groups of 32, all others brought to int8.

    Q4_0  w = (q - 8) d              fp16 d; 16 bytes of q
    Q4_1  w = q d + m                fp16 d and m; 16 bytes of q
    Q4_K  w = q (d s) - (e n)        256 weights: fp16 d and e; s and n, 6 bits each, of every 32; 128 bytes of q

all of which are (q - 8) scale + zero.  No weight is rounded to 4 bits again: scale and zero are rounded to bfloat16,
which moves a weight by .002 of the weights' root mean square; quantising anew in groups of 128 moves it by .095
(docs/experiments/models.md).  Blocks of other types, with 2 to 8 bits a weight, are dequantised and rounded to int8.

Source of the layouts: ggml-common.h and ggml-quants.c in ggml's repository.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import torch
from torch import Tensor

from flowspec_edge.model.weights.gguf_file import GgufFile
from flowspec_edge.stage.quant.base import Scheme, StoredTensors, slices
from flowspec_edge.stage.quant.grouped import GroupedScheme, pack
from flowspec_edge.stage.quant.schemes import Int8Scheme

GROUP = 32
_SUPER = 256  # weights of a block of Q4_K
_MIDDLE = 8


def gguf_importer(file: GgufFile | None) -> GgufImporter | None:
    """Return what repacks the file; None unless decoder layers have matrices in 4 bits."""
    if file is None or not any(name.startswith("model.layers.") and file.type_of(name) in _REPACK
                               for name in file.tensors):
        return None
    return GgufImporter(file)


class GgufImporter:
    """Repacks the matrices of one file that are in blocks: 4 bits as int4, others as int8; floats stay in 16 bits.

    only_int4  a GGUF file can be dequantised as well
    """

    group = GROUP
    only_int4 = False

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._int4, self._int8 = GroupedScheme(GROUP), Int8Scheme()

    def names(self, prefix: str, checkpoint: Container[str]) -> list[str]:
        """Return the weight tensor of a linear; none if it stays in 16 bits."""
        return [f"{prefix}.weight"] if self.scheme_of(prefix) else []

    def scheme_of(self, prefix: str) -> Scheme | None:
        """Return how a linear is stored; None if it stays in 16 bits: floats, and what no group of int8 divides."""
        name = f"{prefix}.weight"
        if name not in self._file.tensors or self._file.is_plain(name):
            return None
        if self._file.type_of(name) in _REPACK:
            return self._int4
        return self._int8 if self._int8.fits(*self._file.info(name).shape) else None

    def pieces(self, prefix: str, checkpoint: StoredTensors, rows: int, columns: int) -> Iterator[dict[str, Tensor]]:
        """Yield the linear [rows, columns] in the layout of its scheme, some MB of rows at a time."""
        name, scheme = f"{prefix}.weight", self.scheme_of(prefix)
        assert scheme is not None
        scheme.group_of(rows, columns)
        for lo, hi in slices(rows, columns):
            yield (repacked(self._file.type_of(name), self._file.blocks(name, lo, hi)) if scheme is self._int4
                   else scheme.quantise(self._file.read(name, lo, hi)))


def repacked(kind: str, blocks: Tensor) -> dict[str, Tensor]:
    """Repack rows of ``blocks``, uint8 [n, bytes of a row].

    ``kind``: their type, which must have 4 bits.
    """
    codes, scales, zeros = _REPACK[kind](blocks)
    return {"qweight": pack(codes.flatten(1)), "scales": scales.to(torch.bfloat16), "zeros": zeros.to(torch.bfloat16)}


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    blocks = blocks.view(len(blocks), -1, 2 + GROUP // 2)
    scales = _half(blocks[..., :2])
    return _halves(blocks[..., 2:]), scales, torch.zeros_like(scales)


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    blocks = blocks.view(len(blocks), -1, 4 + GROUP // 2)
    scales, least = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    return _halves(blocks[..., 4:]), scales, least + _MIDDLE * scales


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    blocks = blocks.view(len(blocks), -1, 16 + _SUPER // 2)
    step_scale, least = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    low, high, nibbles = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    steps = torch.cat((low & 63, (nibbles & 15) | (low >> 6 << 4)), -1)
    minima = torch.cat((high & 63, (nibbles >> 4) | (high >> 6 << 4)), -1)
    scales = step_scale[..., None] * steps
    zeros = _MIDDLE * scales - least[..., None] * minima
    codes = _halves(blocks[..., 16:].reshape(*blocks.shape[:2], -1, GROUP))
    return codes, scales.flatten(1), zeros.flatten(1)


_REPACK: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}


def _half(data: Tensor) -> Tensor:
    """Two bytes each as fp16, in float32."""
    return data.contiguous().view(torch.float16).float().squeeze(-1)


def _halves(data: Tensor) -> Tensor:
    """Return the lower halves of all bytes in a block, then the upper halves."""
    return torch.cat((data & 15, data >> 4), dim=-1)
