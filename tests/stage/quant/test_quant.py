"""The contract of every scheme, and grouped int4 against float64 and brute force."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.int4_matrices import DEVICES, grouped_weights, random_matrix
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.stage.quant.base import KINDS as LAYER_KINDS
from flowspec_edge.stage.quant.base import ROW_BLOCK, Kind, slices
from flowspec_edge.stage.quant.grouped import CpuLinear, kernel, pack, unpack
from flowspec_edge.stage.quant.schemes import scheme

KINDS: tuple[Kind, ...] = (*LAYER_KINDS, "int8")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest result: what the type that a kernel computes in rounds away, doubled for those that add up
# in it.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def tolerance(kind: Kind, dtype: torch.dtype, device: str) -> float:
    """int4's kernels compute in bf16, on a GPU with fp16 activations, too; int8 is two planes of int4."""
    of_int4 = kind in ("int4", "int8") and kernel(dtype, torch.device(device)) is not None
    return TOLERANCE[torch.bfloat16 if of_int4 else dtype]


@given(rows=st.integers(1, 9), pairs=st.integers(1, 40), seed=st.integers(0, 99))
def test_two_codes_a_byte_the_even_column_low(rows: int, pairs: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 16, (rows, 2 * pairs)).astype(np.uint8)
    packed = pack(torch.from_numpy(codes))
    assert packed.tolist() == [[int(row[2 * i]) + 16 * int(row[2 * i + 1]) for i in range(pairs)]
                               for row in codes]
    assert unpack(packed).tolist() == codes.tolist()


@examples(30, quick=12)
@given(kind=st.sampled_from(KINDS), blocks=st.integers(1, 8), columns=st.sampled_from([64, 192, 256, 320]),
       group=st.sampled_from([32, 64, 128, 256]), cuts=st.sets(st.integers(1, 127), max_size=3),
       seed=st.integers(0, 99), dtype=st.sampled_from(FLOATS))
def test_slices_of_rows_give_what_the_whole_gives(kind: Kind, blocks: int, columns: int, group: int,
                                                  cuts: set[int], seed: int, dtype: torch.dtype) -> None:
    rows = 16 * blocks
    weight = random_matrix(rows, columns, seed).to(dtype)
    chosen = scheme(kind, group)
    whole = chosen.quantise(weight)
    assert {name: (tuple(t.shape), t.dtype) for name, t in whole.items()} == chosen.stored(rows, columns)
    edges = [0, *sorted(cut for cut in cuts if cut < rows), rows]
    parts = [chosen.quantise(weight[lo:hi]) for lo, hi in pairwise(edges)]
    for name, tensor in whole.items():
        assert torch.equal(tensor, torch.cat([part[name] for part in parts]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "group"), [(16, 64, 32), (80, 192, 128), (176, 256, 256)])
def test_a_linear_multiplies_by_what_is_stored(kind: Kind, rows: int, columns: int, group: int,
                                               dtype: torch.dtype, device: str) -> None:
    """Against float64, for any number of rows including none, with and without a bias."""
    chosen = scheme(kind, group)
    stored = chosen.quantise(random_matrix(rows, columns))
    bias = torch.linspace(-1, 1, rows)
    weights = chosen.dequantise(stored).double()
    for with_bias in (False, True):
        linear = chosen.linear(rows, columns, with_bias, dtype, device)
        linear.fill(stored, bias if with_bias else None)
        for n in (0, 1, 3, 4, 16, 37):
            x = torch.randn(n, columns, generator=torch.Generator().manual_seed(n)).to(dtype)
            y = linear(x.to(device))
            assert (y.shape, y.dtype) == ((n, rows), dtype)
            if n:
                expected = x.double() @ weights.T
                expected += bias.to(dtype).double() if with_bias else 0
                off = (y.cpu().double() - expected).abs().max() / expected.abs().max()
                assert off < tolerance(kind, dtype, device), f"{n} rows, bias {with_bias}"
        assert linear(torch.zeros(2, 3, columns, dtype=dtype, device=device)).shape == (2, 3, rows)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_int4_stands_for_its_formula(group: int) -> None:
    stored = scheme("int4", group).quantise(random_matrix(16, 256))
    expected = grouped_weights(stored)
    found = scheme("int4", group).dequantise(stored)
    assert np.abs(found.double().numpy() - expected).max() < 1e-7
    assert found.dtype == torch.float32


@examples(30, quick=12)
@given(group=st.sampled_from([32, 64, 128, 256]), seed=st.integers(0, 999), outlier=st.floats(0.1, 1e4))
def test_int8_is_within_half_a_step_of_the_largest_weight(group: int, seed: int, outlier: float) -> None:
    weight = torch.from_numpy(np.random.default_rng(seed).normal(size=(16, 256))).float()
    weight[3, 7] = outlier
    chosen = scheme("int8", group)
    stored = chosen.quantise(weight)
    lost = (chosen.dequantise(stored) - weight).view(16, -1, group).abs().amax(-1)
    assert (lost <= weight.view(16, -1, group).abs().amax(-1) / 119 * (0.5 + 2**-7)).all()


@examples(25, quick=10)
@given(group=st.sampled_from([32, 64, 128]), seed=st.integers(0, 999), shift=st.floats(-3, 3))
def test_weights_on_a_grid_of_sixteen_are_kept(group: int, seed: int, shift: float) -> None:
    """Nothing is lost if scale and zero are bfloat16 values and both extreme codes occur."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (16, 2, group))
    codes[:, :, 0], codes[:, :, -1] = 0, 15
    scale = torch.from_numpy(random.uniform(0.01, 0.1, (16, 2, 1))).bfloat16().float()
    zero = (shift * scale).bfloat16().float()
    weight = ((torch.from_numpy(codes) - 8) * scale + zero).reshape(16, -1)
    chosen = scheme("int4", group)
    stored = chosen.quantise(weight)
    assert unpack(stored["qweight"]).reshape(codes.shape).tolist() == codes.tolist()
    assert (chosen.dequantise(stored) - weight).abs().max() < 1e-2 * float(scale.min())


@pytest.mark.parametrize("shape", ["bell", "flat", "one outlier", "to one side"])
def test_the_clip_search_is_nearly_the_best(shape: str) -> None:
    """Against all pairs of clippings on a fine grid, each refitted until nothing changes."""
    random = np.random.default_rng(1)
    w = {"bell": random.normal, "flat": random.uniform, "one outlier": random.normal,
         "to one side": random.exponential}[shape](size=(8, 128))
    if shape == "one outlier":
        w[:, 5] *= 8
    chosen = scheme("int4", 128)
    stored = chosen.quantise(torch.from_numpy(np.repeat(w, 2, axis=0)))  # 16 rows
    found = (chosen.dequantise(stored).double().numpy()[::2] - w) ** 2
    ends = np.linspace(0.3, 1, 15)
    lows, highs = (grid.reshape(-1, 1) for grid in np.meshgrid(ends, ends))
    best = sum(_errors(row, lows * row.min(), highs * row.max()).min() for row in w)
    assert found.sum() < 1.06 * best
    plain = sum(_errors(row, row.min(keepdims=True), row.max(keepdims=True), fits=0).min() for row in w)
    assert found.sum() < plain


def _errors(w: Any, lows: Any, highs: Any, fits: int = 5) -> Any:
    """Squared errors of rounding w [n] to 16 levels from lows to highs [m, 1], after refitting them."""
    scale, zero = (highs - lows) / 15, lows
    for _ in range(fits):
        q = np.clip(np.round((w - zero) / scale), 0, 15)
        middle = q - q.mean(1, keepdims=True)
        scale = (middle * w).sum(1, keepdims=True) / (middle**2).sum(1, keepdims=True)
        zero = w.mean() - scale * q.mean(1, keepdims=True)
    q = np.clip(np.round((w - zero) / scale), 0, 15)
    return ((q * scale + zero - w) ** 2).sum(-1)


@pytest.mark.parametrize("value", [0.0, 0.37, -1e-6, 1e-30, 2e4])
def test_groups_of_equal_weights(value: float) -> None:
    weight = torch.full((16, 64), value)
    found = scheme("int4", 64).dequantise(scheme("int4", 64).quantise(weight))
    assert (found - weight).abs().max() <= 2**-8 * abs(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(kind: Kind, bad: float) -> None:
    weight = random_matrix(16, 64)
    weight[3, 5] = bad
    with pytest.raises(FlowspecError, match="infinite or not a number"):
        scheme(kind).quantise(weight)


@pytest.mark.parametrize(("kind", "group", "shape", "fits"), [
    ("int4", 128, (4096, 4096), 128), ("int4", 128, (192, 192), 64), ("int4", 32, (4096, 4096), 32),
    ("int4", 256, (64, 96), 32), ("int4", 128, (24, 4096), None), ("int4", 128, (64, 80), None),
    ("int4", 64, (0, 64), None), ("int4", 64, (16, 0), None),
    ("nf4", 128, (4096, 192), 64), ("fp4", 128, (5, 64), 64), ("nf4", 128, (64, 96), None),
])
def test_what_fits(kind: Kind, group: int, shape: tuple[int, int], fits: int | None) -> None:
    chosen = scheme(kind, group)
    assert chosen.fits(*shape) == fits
    if fits is None:
        for refuse in (lambda: chosen.stored(*shape),
                       lambda: chosen.linear(*shape, bias=False, dtype=torch.float32)):
            with pytest.raises(UsageError, match=f"{kind} .*{shape[0]} x {shape[1]}"):
                refuse()


def test_unknown_kinds_and_groups() -> None:
    unknown: Any = "int3"
    with pytest.raises(UsageError, match="'int3'"):
        scheme(unknown)
    with pytest.raises(UsageError, match=r"int4 .*100"):
        scheme("int4", 100)


@pytest.mark.parametrize("kind", KINDS)
def test_filling_checks_what_it_is_given(kind: Kind) -> None:
    chosen = scheme(kind)
    stored = chosen.quantise(random_matrix(32, 64))
    linear = chosen.linear(32, 64, False, torch.float32)
    lacking = {"qweight": stored["qweight"]}
    with pytest.raises(FlowspecError, match=f"{kind} matrix of 32 x 64 .*qweight"):
        linear.fill(lacking)
    with pytest.raises(FlowspecError, match=r"qweight of .* must be torch.u?int8 \[32, .*\], and is .*16, "):
        linear.fill({**stored, "qweight": stored["qweight"][:16]})
    with pytest.raises(FlowspecError, match="must not have a bias"):
        linear.fill(stored, torch.zeros(32))
    biased = chosen.linear(32, 64, True, torch.float32)
    with pytest.raises(FlowspecError, match="must have a bias"):
        biased.fill(stored)
    with pytest.raises(FlowspecError, match=r"bias .* has shape \[16\]"):
        biased.fill(stored, torch.zeros(16))


@pytest.mark.parametrize("rows", [16, 48, 64, 80, 2096])
def test_packing_slices_gives_what_packing_the_whole_gives(rows: int) -> None:
    """The kernel's layout differs between CPUs; this is the property that packing by slices relies on."""
    columns = 1024
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 16, (rows, columns)))
    linear = scheme("int4").linear(rows, columns, False, torch.bfloat16)
    assert isinstance(linear, CpuLinear)
    few = torch.zeros(rows, columns // 128, dtype=torch.bfloat16)
    linear.fill({"qweight": pack(codes.byte()), "scales": few, "zeros": few})
    whole = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    assert torch.equal(linear.get_buffer("packed"), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_casting_a_model_leaves_its_scales_alone(kind: Kind) -> None:
    linear = scheme(kind).linear(16, 64, True, torch.float32)
    linear.fill(scheme(kind).quantise(random_matrix(16, 64)), torch.linspace(-1, 1, 16))
    x = torch.ones(1, 64)
    before = linear(x)
    torch.nn.Sequential(linear).half().to(torch.bfloat16).float()
    assert torch.equal(linear(x), before)


def test_a_row_in_bf16_is_the_same_whatever_stands_beside_it() -> None:
    """So a pipeline's segments give exactly the result of one pass over the text."""
    linear = scheme("int4").linear(208, 1024, False, torch.bfloat16)
    linear.fill(scheme("int4").quantise(random_matrix(208, 1024)))
    x = torch.randn(23, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = linear(x)
    for n in (1, 2, 3, 4, 5, 16):
        assert torch.equal(torch.cat([linear(rows) for rows in x.split(n)]), whole)


@given(rows=st.integers(1, 5000), columns=st.integers(1, 20000), weights=st.integers(1, 1 << 20))
def test_slices_cover_all_rows(rows: int, columns: int, weights: int) -> None:
    runs = list(slices(rows, columns, weights))
    assert [row for lo, hi in runs for row in range(lo, hi)] == list(range(rows))
    assert all(lo % ROW_BLOCK == 0 for lo, _ in runs)
    assert all((hi - lo) * columns <= max(weights, ROW_BLOCK * columns) for lo, hi in runs)


class _Largest(TorchDispatchMode):
    """Bytes of the largest storage that any operation newly returns."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_filling_never_holds_the_whole_matrix(kind: Kind, dtype: torch.dtype) -> None:
    """Nor does multiplying in float32: for a matrix of 32 MB in 16 bits no allocation exceeds a few MB."""
    rows, columns = 4096, 4096
    chosen = scheme(kind)
    shapes = chosen.stored(rows, columns)
    stored = {name: torch.zeros(shape, dtype=kept) for name, (shape, kept) in shapes.items()}
    linear = chosen.linear(rows, columns, False, dtype)
    with _Largest() as seen:
        linear.fill(stored)
        if kind == "int4":
            linear(torch.ones(1, columns, dtype=dtype))
    assert seen.nbytes <= 4 << 20
    bits = {"int4": 4 + 32 / 128, "nf4": 4 + 32 / 64, "fp4": 4 + 32 / 64, "int8": 8 + 32 / 128}[kind]
    assert linear.nbytes == rows * columns * bits / 8
    assert not linear.state_dict()


@pytest.mark.parametrize(("kind", "dtype", "capability", "said"), [
    ("nf4", torch.float16, (8, 7), r"nf4 on .*capability 8\.7: .*more than 4 rows.*--dtype int4"),
    ("fp4", torch.bfloat16, (8, 7), r"fp4 on a GPU"),
    ("nf4", torch.float16, (9, 0), ""),
    ("int4", torch.float16, (8, 7), r"fp16 activations: .*--compute-dtype bf16"),
    ("int4", torch.bfloat16, (8, 7), ""),
    ("int4", torch.float16, (7, 2), ""),  # no product of PyTorch's: weights are expanded
])
def test_what_is_slow_on_a_gpu_is_said_in_a_line(kind: Kind, dtype: torch.dtype, capability: tuple[int, int],
                                                 said: str) -> None:
    caveat = scheme(kind).caveat(dtype, capability)
    assert re.fullmatch(f".*{said}.*" if said else "", caveat)
