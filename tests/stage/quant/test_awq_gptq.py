"""AWQ and GPTQ linears, packed here by their definition from known integers, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kits.int4_matrices import DEVICES, grouped_weights
from numpy.typing import NDArray
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.stage.quant.awq_gptq import Importer, importer
from flowspec_edge.stage.quant.grouped import unpack
from flowspec_edge.stage.quant.schemes import scheme

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in an int32, from the lowest bits
IN_ORDER = tuple(range(8))


def words(numbers: NDArray[np.int64], axis: int, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """Pack numbers 0..15, eight along ``axis``, into int32."""
    moved = np.moveaxis(numbers, axis, -1)
    packed = np.zeros((*moved.shape[:-1], moved.shape[-1] // 8), dtype=np.uint32)
    for i in range(packed.shape[-1]):
        for place, column in enumerate(order):
            packed[..., i] |= moved[..., 8 * i + column].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed.view(np.int32), -1, axis)))


class Made:
    """A quantised matrix [rows, columns] of known integers, and both kinds of files' tensors."""

    def __init__(self, rows: int, columns: int, group: int, exact: bool = True, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        groups = 1 if group == -1 else columns // group
        self.codes = random.integers(0, 16, (rows, columns))
        self.zeros = random.integers(0, 16, (rows, groups))
        scales = torch.from_numpy(random.uniform(0.005, 0.05, (rows, groups)))
        if exact:  # a power of two: nothing is lost in bfloat16
            scales = 2.0 ** scales.log2().round()
        self.scales = scales.half()
        self.group = columns if group == -1 else group
        zeros, steps = (np.repeat(facts, self.group, axis=1)
                        for facts in (self.zeros, self.scales.double().numpy()))
        self.weights = (self.codes - zeros) * steps

    def awq(self) -> dict[str, Tensor]:
        return {"qweight": words(self.codes.T, 1, AWQ_ORDER), "qzeros": words(self.zeros.T, 1, AWQ_ORDER),
                "scales": self.scales.t().contiguous()}

    def gptq(self, less: int) -> dict[str, Tensor]:
        return {"qweight": words(self.codes.T, 0), "qzeros": words((self.zeros.T - less) % 16, 1),
                "scales": self.scales.t().contiguous(),
                "g_idx": torch.arange(self.codes.shape[1], dtype=torch.int32) // self.group}


def reader(**facts: Any) -> Importer:
    found = importer({"quantization_config": {"bits": 4, "group_size": 128, **facts}})
    assert found is not None
    return found


LAYOUTS = {
    "awq": ({"quant_method": "awq", "version": "gemm", "zero_point": True}, Made.awq),
    "gptq": ({"quant_method": "gptq", "checkpoint_format": "gptq"}, lambda made: made.gptq(1)),
    "gptq, not said": ({"quant_method": "gptq", "desc_act": False}, lambda made: made.gptq(1)),
    "gptq_v2": ({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, lambda made: made.gptq(0)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "columns", "group", "ours"), [
    (64, 256, 128, 128), (48, 192, 64, 64), (16, 512, 512, 256), (16, 128, -1, 128), (2064, 1024, 32, 32),
])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_linear_multiplies_by_the_integers(layout: str, rows: int, columns: int, group: int, ours: int,
                                               device: str) -> None:
    facts, store = LAYOUTS[layout]
    made = Made(rows, columns, group)
    read = reader(**facts, group_size=group)
    assert read.group == ours
    chosen = scheme("int4", read.group)
    stored = read.convert(store(made), rows, columns)
    assert unpack(stored["qweight"]).tolist() == made.codes.tolist()
    linear = chosen.linear(rows, columns, False, torch.float32, device)
    linear.fill(stored)
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ torch.from_numpy(made.weights).T
    found = linear(x.to(device)).cpu().double()
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_scales_are_rounded_by_a_twentieth_of_a_step(layout: str) -> None:
    facts, store = LAYOUTS[layout]
    made = Made(64, 256, 128, exact=False)
    found = grouped_weights(reader(**facts).convert(store(made), 64, 256))
    steps = np.repeat(made.scales.double().numpy(), 128, axis=1)
    assert (np.abs(found - made.weights) / steps).max() < 0.05


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_of_a_linear(layout: str) -> None:
    facts, store = LAYOUTS[layout]
    tensors = {f"model.layers.0.mlp.up_proj.{name}": t for name, t in store(Made(16, 128, 128)).items()}
    read = reader(**facts)
    prefix = "model.layers.0.mlp.up_proj"
    assert set(read.names(prefix, tensors)) == set(tensors)
    stored = read.convert({name: tensors[name] for name in read.names(prefix, tensors)}, 16, 128)
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == scheme("int4").stored(16, 128)
    assert read.names("lm_head", {"lm_head.weight"}) == []
    del tensors[f"{prefix}.scales"]
    with pytest.raises(FlowspecError, match=r"up_proj\.qweight but no model.layers.0.mlp.up_proj.scales"):
        read.names(prefix, tensors)
    if "gptq" in layout:  # older files have no g_idx
        old = {f"{prefix}.{name}" for name in ("qweight", "qzeros", "scales")}
        assert set(read.names(prefix, old)) == old


def test_act_order_is_refused_only_where_it_matters() -> None:
    made = Made(16, 256, 128)
    read = reader(quant_method="gptq", desc_act=True)
    tensors = made.gptq(1)
    assert np.abs(grouped_weights(read.convert(tensors, 16, 256)) - made.weights).max() < 1e-9
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    with pytest.raises(UsageError, match=r"desc_act"):
        read.convert(tensors, 16, 256)


@pytest.mark.parametrize(("facts", "says"), [
    ({"quant_method": "gptq", "bits": 8}, r"has 8 bits a weight \(GPTQ\): only 4 can be read"),
    ({"quant_method": "awq", "bits": 3}, r"has 3 bits a weight \(AWQ\)"),
    ({"quant_method": "bitsandbytes"}, "quantised with 'bitsandbytes': only AWQ and GPTQ can be read"),
    ({"quant_method": "compressed-tensors"}, "quantised with 'compressed-tensors'"),
    ({"quant_method": "awq", "version": "gemv"}, "AWQ checkpoints in the layout 'gemv' cannot be read"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "GPTQ checkpoints in the layout 'marlin'"),
    ({"quant_method": "gptq", "is_marlin_format": True}, "GPTQ checkpoints in the layout 'marlin'"),
    ({"quant_method": "gptq", "group_size": 48}, "groups of 48 weights: only multiples of 32"),
    ({"quant_method": "gptq", "group_size": None}, "a group size of None"),
])
def test_other_layouts_are_refused_by_name(facts: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        reader(**facts)


def test_tensors_of_another_shape_are_refused_by_name() -> None:
    read, tensors = reader(quant_method="awq"), Made(32, 256, 128).awq()
    with pytest.raises(FlowspecError, match=r"qweight of .* 16 x 256 has shape \[256, 4\], and should have "
                                            r"\[256, 2\]"):
        read.convert(tensors, 16, 256)
    tensors["scales"] = tensors["scales"][:1]
    with pytest.raises(FlowspecError, match=r"scales of .* has shape \[1, 32\]"):
        read.convert(tensors, 32, 256)
    with pytest.raises(UsageError, match="groups of 128 do not cut 192 inputs"):
        read.convert(tensors, 32, 192)
