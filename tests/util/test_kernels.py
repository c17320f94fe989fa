"""Layers' parts in few launches, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples

from flowspec_edge.util.kernels import HeadNorms, RmsNorm, rotate_in_place

ULP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
dtypes = st.sampled_from(list(ULP))
seeds = st.integers(0, 999)


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def rows(count: int, width: int, dtype: torch.dtype, seed: int, size: float) -> torch.Tensor:
    """With one dimension far larger than the others, as in real models."""
    torch.manual_seed(seed)
    x = torch.randn(count, width) * size
    x[:, seed % width] *= 200
    return x.to(dtype)


@pytest.mark.parametrize("fused", [True, False])
@examples(60, quick=18)
@given(dtype=dtypes, seed=seeds, width=st.sampled_from([32, 64, 320, 4096]),
       size=st.sampled_from([1e-3, 0.02, 1.0, 30.0]), eps=st.sampled_from([1e-6, 1e-5]))
def test_a_norm_is_rounded_once(fused: bool, dtype: torch.dtype, seed: int, width: int, size: float,
                                eps: float) -> None:
    x, weight = rows(5, width, dtype, seed, size), (torch.rand(width) + 0.5).to(dtype)
    x[3] = 0  # padding
    expected = exact(x, weight, eps)
    off = (RmsNorm(weight, eps, fused)(x).double() - expected).abs()
    smallest, most = torch.finfo(dtype).smallest_normal, expected.abs().amax(-1, keepdim=True)
    # Half a unit for the rounding of the result, half a unit of float32's for each step before, and the mean.
    allowed = expected.abs() * (0.51 * ULP[dtype] + 8 * ULP[torch.float32]) + most * 2.0**-24 + smallest
    assert (off <= allowed).all()


@examples(40, quick=12)
@given(dtype=dtypes, seed=seeds, heads=st.integers(1, 6), width=st.sampled_from([8, 64, 128]))
def test_heads_have_their_own_weights(dtype: torch.dtype, seed: int, heads: int, width: int) -> None:
    """In a view of a larger tensor, whose other heads stay."""
    whole = rows(4 * (heads + 2), width, dtype, seed, 1.0).view(4, heads + 2, width)
    weights, before = (torch.rand(heads, width) + 0.5).to(dtype), whole.clone()
    HeadNorms(weights, 1e-6).in_place(whole[:, :heads])
    expected = exact(before[:, :heads], weights, 1e-6)
    off = (whole[:, :heads].double() - expected).abs()
    allowed = expected.abs() * (1.1 * ULP[dtype] + 8 * ULP[torch.float32]) + 1e-6  # rounded twice
    assert (off <= allowed).all()
    assert torch.equal(whole[:, heads:], before[:, heads:])


@examples(40, quick=12)
@given(seed=seeds, count=st.integers(1, 5), heads=st.integers(1, 4), width=st.sampled_from([4, 16, 128]))
def test_a_rotation_turns_pairs_of_halves(seed: int, count: int, heads: int, width: int) -> None:
    """As complex numbers a + ib, times e^{i angle}."""
    torch.manual_seed(seed)
    x, angles = torch.randn(count, heads, width), torch.randn(count, width // 2)
    low, high = x.double().chunk(2, -1)
    turned = torch.complex(low, high) * torch.exp(1j * angles.double())[:, None]
    cos, sin = (torch.cat(halves, -1)[:, None] for halves in (
        (angles.cos(), angles.cos()), (-angles.sin(), angles.sin())))
    rotate_in_place(x, (cos, sin))
    torch.testing.assert_close(x.double(), torch.cat([turned.real, turned.imag], -1), atol=1e-5, rtol=1e-5)
