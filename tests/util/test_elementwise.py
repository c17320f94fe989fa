"""Activations against float64, and each row's bits against those of the row alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flowspec_edge.util.elementwise import gelu_tanh, sigmoid, silu, softplus

ACTIVATIONS: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (sigmoid, torch.sigmoid), (silu, F.silu), (softplus, F.softplus), (gelu_tanh, partial(F.gelu, approximate="tanh"))]


@pytest.mark.parametrize("width", [1, 4, 48, 80, 128])
@pytest.mark.parametrize(("ours", "published"), ACTIVATIONS)
def test_a_rows_bits_are_those_of_the_row_alone(ours: Callable[[Tensor], Tensor],
                                                published: Callable[[Tensor], Tensor], width: int) -> None:
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(0)) * 4
    whole = ours(x)
    torch.testing.assert_close(whole.double(), published(x.double()), atol=1e-6, rtol=1e-6)
    for rows in (1, 3, 7, 16):
        for start in range(0, 64 - rows, 5):
            some = slice(start, start + rows)
            assert torch.equal(ours(x[some].clone()), whole[some])


@pytest.mark.parametrize("ours", [ours for ours, _ in ACTIVATIONS])
def test_threads_share_a_row(ours: Callable[[Tensor], Tensor]) -> None:
    """Of so many values each of three threads takes a share, whose end lies within a row."""
    x = torch.randn(33, 8192, generator=torch.Generator().manual_seed(0)) * 4
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(torch.cat((ours(x[:11]), ours(x[11:]))), ours(x))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("ours", "published"), ACTIVATIONS)
def test_large_values_and_16_bits(ours: Callable[[Tensor], Tensor], published: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([-3e4, -100.0, -20.0, 0.0, 20.0, 100.0, 3e4])
    torch.testing.assert_close(ours(x), published(x))
    for dtype in (torch.bfloat16, torch.float16):
        assert ours(x.to(dtype)).dtype == dtype
        torch.testing.assert_close(ours(x.to(dtype)), published(x.to(dtype)))
