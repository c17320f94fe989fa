"""4-bit matrices for tests: where they run, and what they stand for, worked out without the package."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kits.torch_devices import needs_cuda

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=needs_cuda),
]


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """[rows, columns] float32, some rows larger than others, some weights far out."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.05 * torch.randn(rows, columns, generator=generator)
    weight *= torch.rand(rows, 1, generator=generator) + 0.5
    far = torch.rand(rows, columns, generator=generator) < 0.002
    return torch.where(far, 6 * weight, weight)


def grouped_weights(stored: Mapping[str, Tensor]) -> NDArray[np.float64]:
    """What grouped int4 stands for, element by element, in float64."""
    packed = stored["qweight"].cpu().numpy()
    scales, zeros = (stored[name].cpu().double().numpy() for name in ("scales", "zeros"))
    group = 2 * packed.shape[1] // scales.shape[1]
    weights = np.empty((packed.shape[0], 2 * packed.shape[1]))
    for row in range(weights.shape[0]):
        for column in range(weights.shape[1]):
            byte = int(packed[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            weights[row, column] = (code - 8) * scales[row, column // group] + zeros[row, column // group]
    return weights
