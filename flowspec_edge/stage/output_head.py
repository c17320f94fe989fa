"""Loads the target's lm_head: in 16 bits, or in 8 or 4, in blocks of rows.

On Jetsons from L4T 36.4.7 on a large piece of device memory may be refused although the memory is free, and
this matrix is the largest: 1.6 GB in 16 bits for 152,000 tokens and a width of 5,120.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import prod
from pathlib import Path

import torch

from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.manifest import DRAFT
from flowspec_edge.model.opened import OpenModel, OpenPart, opened
from flowspec_edge.model.output_head import MatrixRows, OutputHead
from flowspec_edge.model.weights.checkpoint import Checkpoint, check_shape
from flowspec_edge.stage.quant.base import QuantLinear, Scheme
from flowspec_edge.stage.quant.half import HalfLinear, is_mixed
from flowspec_edge.stage.quant.sizes import HEAD_BLOCK_BYTES
from flowspec_edge.stage.weights.load import head_scheme_of
from flowspec_edge.stage.weights.tensor_names import EMBEDDING, LM_HEAD
from flowspec_edge.util.tensors import check_finite, parse_dtype

_SLICE = 1024  # rows that are read at a time
PREFIX = LM_HEAD.removesuffix(".weight")  # of the names of a quantised matrix' tensors


def load_output_head(model: OpenModel | Path | str, dtype: str, device: torch.device | str = "cpu") -> OutputHead:
    """Load the lm_head of a checkpoint, or of D0's part of a sharded model; the embeddings if tied.

    A sharded model's files are all compared with its manifest.
    FlowspecError that names a missing, misshapen or damaged tensor, or a missing or altered file.
    """
    open_model = opened(model)
    with open_model.part(DRAFT) as part:
        return read_output_head(part, dtype, device, head_scheme_of(open_model))


def read_output_head(part: OpenPart, dtype: str, device: torch.device | str, scheme: Scheme | None) -> OutputHead:
    """Read a part's lm_head; ``scheme``: of a matrix that is stored quantised."""
    config, checkpoint = part.decoder, part.checkpoint
    torch_dtype, at = parse_dtype(dtype), torch.device(device)
    halves = scheme is None and is_mixed(dtype, at)
    element_type = torch.float16 if halves else torch_dtype
    rows, width = config.vocab_size, config.hidden_size
    if scheme is None:
        tied = config.tie_word_embeddings and LM_HEAD not in checkpoint
        names = {"weight": EMBEDDING if tied else LM_HEAD}
        expected: dict[str, tuple[torch.Size, torch.dtype | None]] = {
            names["weight"]: (torch.Size((rows, width)), None)}
        row_bytes = width * element_type.itemsize
    else:
        stored = scheme.stored(rows, width)
        names = {suffix: f"{PREFIX}.{suffix}" for suffix in stored}
        expected = {names[suffix]: (torch.Size(shape), element) for suffix, (shape, element) in stored.items()}
        row_bytes = sum(prod(shape) * element.itemsize for shape, element in stored.values()) // rows
    _check(checkpoint, expected)
    edges = _edges(rows, row_bytes)
    blocks: list[MatrixRows | QuantLinear | HalfLinear] = [
        scheme.linear(hi - lo, width, False, torch_dtype, at) if scheme
        else MatrixRows(torch.empty((hi - lo, width), dtype=element_type, device=at))
        for lo, hi in pairwise(edges)]
    first, *others = names.items()
    beside = checkpoint.tensors([name for _, name in others])  # scales: a thirtieth of the matrix
    for name, tensor in beside.items():
        check_finite(tensor, tensor.dtype, f"{checkpoint.display_path}: tensor {name}")
    for lo, piece in checkpoint.pieces(first[1], _SLICE):
        check_finite(piece, element_type if scheme is None else piece.dtype,
                     f"{checkpoint.display_path}: tensor {first[1]}")
        block = bisect_right(edges, lo) - 1
        stored_rows = {suffix: beside[name][lo:lo + len(piece)] for suffix, name in others}
        target = blocks[block]
        start = lo - edges[block]
        if isinstance(target, MatrixRows):
            target.weight[start:start + len(piece)].copy_(piece)
        elif isinstance(target, QuantLinear):
            target.fill_rows(start, {first[0]: piece, **stored_rows})
    if halves:
        for index, source in enumerate(blocks):  # no more than one block is in memory twice
            if isinstance(source, MatrixRows):
                blocks[index] = HalfLinear(source.weight)
                del source.weight
    return OutputHead(blocks, width, torch_dtype, at)


def _edges(rows: int, row_bytes: float) -> list[int]:
    """Where blocks begin and end."""
    step = max(1, int(HEAD_BLOCK_BYTES / row_bytes) // _SLICE) * _SLICE
    return [*range(0, rows, step), rows]


def _check(checkpoint: Checkpoint, stored: dict[str, tuple[torch.Size, torch.dtype | None]]) -> None:
    infos = checkpoint.stored(list(stored))
    for name, (shape, dtype) in stored.items():
        check_shape(checkpoint.directory, name, infos[name].shape, shape)
        if dtype not in (None, infos[name].dtype):
            raise FlowspecError(f"{checkpoint.display_path}: tensor {name} is stored as {infos[name].dtype}, "
                                f"not {dtype}: copy the model again")
