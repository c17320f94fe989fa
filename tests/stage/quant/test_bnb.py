"""nf4 and fp4 against bitsandbytes' own functions and modules."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from kits.int4_matrices import DEVICES, random_matrix

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.stage.quant.base import Kind
from flowspec_edge.stage.quant.schemes import library, scheme

BNB: list[Kind] = ["nf4", "fp4"]


@pytest.fixture(scope="module")
def bitsandbytes() -> ModuleType:
    """Imported by the one process that needs it: it takes seconds."""
    import bitsandbytes

    return bitsandbytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", BNB)
def test_what_is_stored_is_what_bitsandbytes_stores(bitsandbytes: ModuleType, kind: Kind, device: str
                                                    ) -> None:
    weight = random_matrix(80, 192).to(device)
    functional = bitsandbytes.functional
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=False)
    stored = scheme(kind).quantise(weight)
    assert torch.equal(stored["qweight"].flatten(), packed.flatten())
    assert torch.equal(stored["absmax"].flatten(), state.absmax)
    assert torch.equal(scheme(kind).dequantise(stored), functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", BNB)
def test_a_linear_is_bitsandbytes_own(bitsandbytes: ModuleType, kind: Kind, dtype: torch.dtype, device: str
                                      ) -> None:
    rows, columns = 96, 128
    weight, bias = random_matrix(rows, columns), torch.linspace(-1, 1, rows)
    theirs = bitsandbytes.nn.Linear4bit(columns, rows, bias=True, compute_dtype=dtype, quant_type=kind,
                                        compress_statistics=False)
    theirs.load_state_dict({"weight": weight, "bias": bias})
    theirs = theirs.to(device)
    if theirs.weight.quant_state is None:  # older versions quantise on a GPU only
        theirs.weight._quantize(device)
    ours = scheme(kind).linear(rows, columns, True, dtype, device)
    ours.fill(scheme(kind).quantise(weight), bias)
    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs(x), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_a_version_that_lacks_a_device_is_named(bitsandbytes: ModuleType, monkeypatch: pytest.MonkeyPatch
                                                ) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise NotImplementedError("Device type not supported for FP4 quantization: cpu")  # 0.45's own words

    chosen = scheme("fp4")
    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", refuse)
    with pytest.raises(FlowspecError, match=r"cannot quantise to fp4 on cpu \(Device type not.*use 0.49"):
        chosen.quantise(random_matrix(16, 64))


def test_without_bitsandbytes_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # what importing a missing package finds
    library.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"pip install '\.\[int4\]' .*, or use int4"):
            scheme("nf4")
        assert scheme("int4").kind == "int4"
    finally:
        library.cache_clear()
