"""int4 matrices that are expanded for products of many rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from flowspec_edge.stage.quant.expanded import pairs_by_operations, rows_of_tiles
from flowspec_edge.stage.quant.grouped import expand, pack


def packed_as_on_a_gpu(codes: np.ndarray, inner: int) -> Tensor:
    """Of codes [rows, columns], as PyTorch's source has it for a GPU (``matrix_to_m16n8k16_Bint4_layout``): lane by
    lane of a tile of 8 rows and 16 columns, the eight codes of two such tiles in a word, 7 5 3 1 6 4 2 0 from its high
    end."""
    rows, columns = codes.shape
    packed = np.zeros((rows // 8, columns // (16 * inner), 32, inner // 2), np.uint32)
    for tile in range(rows // 8):
        for run in range(columns // (16 * inner)):
            for lane in range(32):
                for word in range(inner // 2):
                    row, first = 8 * tile + lane // 4, 16 * (run * inner + 2 * word) + 2 * (lane % 4)
                    values = [int(codes[row, first + at]) for at in (0, 1, 8, 9, 16, 17, 24, 25)]
                    shifts = (0, 16, 4, 20, 8, 24, 12, 28)
                    packed[tile, run, lane, word] = sum(v << s for v, s in zip(values, shifts, strict=True))
    return torch.from_numpy(packed.view(np.int32))


@pytest.mark.parametrize("inner", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_tiles_of_a_gpu(inner: int, group: int) -> None:
    """What a GPU would compute in one kernel, here by operations; no GPU has run the kernel itself."""
    rows, columns = 24, 512
    random = np.random.default_rng(inner + group)
    codes = random.integers(0, 16, (rows, columns))
    scales = torch.from_numpy(random.normal(size=(rows, columns // group))).to(torch.bfloat16)
    zeros = torch.from_numpy(random.normal(size=(rows, columns // group))).to(torch.bfloat16)
    both = torch.stack([scales.t(), zeros.t()], -1).contiguous()
    found = rows_of_tiles(packed_as_on_a_gpu(codes, inner), both, group, pairs_by_operations)
    wanted = expand(pack(torch.from_numpy(codes).to(torch.uint8)), scales, zeros).to(torch.bfloat16)
    assert found.shape == (rows, columns)
    assert torch.equal(found, wanted)
