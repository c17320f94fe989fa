"""How many bytes matrices take in 4 and 8 bits, and which bits are taken by default; without torch.

The schemes themselves are in ``grouped`` (int4) and ``schemes`` (int8, which is two planes of int4).
"""

from __future__ import annotations

from typing import Literal, get_args

from flowspec_edge.model.manifest import HeadBits, QuantKind, ShardDtype

DEFAULT_GROUP = 128
GROUPS = (32, 64, 128, 256)  # sizes that the kernels support
ROWS = 16  # the CPU's kernel needs a multiple of this many rows of a matrix; the GPU's, of 8
EXPANDED_BYTES = 32 << 20  # of int4 weights in 16 bits, which a stage has in memory at once for a product of many rows
HEAD_BLOCK_BYTES = 240 << 20  # of a piece of lm_head
_SCALE_AND_ZERO = 4  # bytes of a group
Packed = Literal["int4", "int8"]


def group_for(rows: int, columns: int, group: int) -> int | None:
    """Return the largest group of at most ``group`` weights that a matrix can have; None: it must stay in 16 bits."""
    if rows % ROWS or not rows:
        return None
    return max((g for g in GROUPS if g <= group and columns % g == 0 and columns), default=None)


def matrix_bytes(rows: int, columns: int, width: int, packed: Packed | None, group: int = DEFAULT_GROUP) -> int:
    """Bytes of a matrix in memory, in ``width`` bytes a value if it is not ``packed`` or cannot be."""
    fitting = group_for(rows, columns, group) if packed else None
    if fitting is None:
        return rows * columns * width
    codes = rows * columns // (2 if packed == "int4" else 1)
    return codes + rows * (columns // fitting) * _SCALE_AND_ZERO


def factor_bytes(rank: int, rows: int, columns: int, width: int, packed: Packed | None) -> int:
    """Bytes in memory of a candidate head's factor of an lm_head [rows, columns]; a pass reads all of it."""
    return matrix_bytes(rows, rank, width, packed) + rank * columns * width


def rescored_bytes(tokens: int, rows: int, columns: int, width: int, packed: Packed | None) -> int:
    """Return the bytes that looking up ``tokens`` rows of an lm_head [rows, columns] moves.

    The rows are read, and, from each of the pieces in which lm_head is in memory, written and read as a matrix.
    """
    matrix = matrix_bytes(rows, columns, width, packed)
    pieces = -(-matrix // HEAD_BLOCK_BYTES)
    return round(tokens * matrix / rows * (1 + 2 * pieces))


def default_head_bits(dtype: ShardDtype) -> HeadBits:
    """Return the default for a model whose decoder layers are stored in ``dtype``.

    Beside layers in 4 bits, lm_head loses nothing measurable in 8 bits.  In 4 bits it adds a fifth to a half of what
    the layers lose (docs/reference/models.md).
    """
    return "int8" if dtype in get_args(QuantKind) else "16bit"


def draft_bits(lm_head: HeadBits) -> HeadBits:
    """Return the bits of draft heads beside such an lm_head: 4, unless that has 16.

    What drafts changes no token of the text, and every pass reads it.
    """
    return "16bit" if lm_head == "16bit" else "int4"


def packed_as(bits: HeadBits) -> Packed | None:
    return None if bits == "16bit" else bits
