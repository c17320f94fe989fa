"""The kernel test of a device: real products, wrong ones, and a library that ends the process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kits.int4_matrices import DEVICES
from kits.torch_devices import without_cuda

from flowspec_edge.boards.gpu_check import kernel_check
from flowspec_edge.boards.gpu_check.computations import Computation, ComputationResult, attempt, compute
from flowspec_edge.boards.gpu_check.kernel_check import KINDS, computed_in
from flowspec_edge.boards.measurement.kernels import (
    INT4_ROWS,
    KernelReport,
    KindResult,
    measure_int4,
    measure_kernels,
)
from flowspec_edge.boards.probe.compute_rules import TOLERANCE, advisable, computed, product
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.errors import UsageError
from flowspec_edge.stage.quant import grouped
from flowspec_edge.stage.quant.base import KINDS as QUANTISED

# What bitsandbytes does on a board that its wheel was not built for: all is well until the first kernel.
ENDS_THE_PROCESS = """
import os, sys
class functional:
    class QuantState:
        pass
    @staticmethod
    def quantize_4bit(*arguments, **named):
        print("Error no kernel image is available for execution on the device at line 62", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
"""
# After an illegal access, as of a wrong index, every call of CUDA fails until the process ends.
LOSES_ITS_CONTEXT = """
import torch
lost = False
def synchronize():
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
def use(kind):
    global lost
    lost = lost or kind in "bc"
    if kind == "b":
        raise RuntimeError("CUDA error")
    return kind
"""


def wished(kind: str, device: str = "cpu", dtype: str = "bf16", rows: Sequence[int] = (1, 5), timeout_s: float = 300.0
           ) -> Computation:
    return replace(product(kind, kind, device, (64, 128), rows, dtype), timeout_s=timeout_s)


def tried(kind: str, device: str = "cpu", dtype: str = "bf16", rows: Sequence[int] = (1, 5)) -> Finding:
    return computed(attempt(wished(kind, device, dtype, rows)))


@pytest.mark.parametrize("device", DEVICES)
def test_every_kind_is_tried_and_timed(device: str) -> None:
    """bitsandbytes' kinds too where the command's own test, on a CPU, does not see to it."""
    kinds = KINDS if device == "cuda" else ("fp32", "bf16", "fp16", "int4")
    report = measure_kernels(device, (64, 128), (4, 1), kinds=kinds, rounds=2)
    assert list(report.kinds) == list(kinds)
    assert report.rows == (1, 4)
    for kind, found in report.kinds.items():
        assert found.check.ok, f"{kind}: {found.check.found}"
        assert found.check.error is not None
        assert 0 < found.check.error < 2**-6
        assert set(found.ms) == {1, 4}
        assert min(found.ms.values()) > 0
    assert report.kinds["fp32"].nbytes == 64 * 128 * 4
    assert report.kinds["int4"].nbytes == 64 * 128 // 2 + 64 * 4
    assert report.fastest in QUANTISED if device == "cuda" else report.fastest == "int4"
    assert report.copy_rate > 0


@pytest.mark.slow
def test_a_profile_gets_int4_beside_its_own_weights() -> None:
    found = measure_int4("cpu", "fp32", (64, 128))
    assert found is not None
    assert found.rows == list(INT4_ROWS)
    assert (sorted(found.ms), sorted(found.full_ms)) == (found.ms, found.full_ms)
    assert found.ratio(1) == pytest.approx(found.ms[0] / found.full_ms[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_in_every_type(kind: str, dtype: str, device: str) -> None:
    found = tried(kind, device, dtype)
    assert found.ok, found.found
    exact = kind == "fp32" or (kind in QUANTISED and dtype == "fp32")
    assert found.error is not None
    assert found.error < (1e-5 if exact else 2**-6)


@pytest.mark.slow
def test_a_library_that_ends_the_process_is_a_finding(tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bitsandbytes.py").write_text(ENDS_THE_PROCESS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = compute([wished(kind) for kind in ("fp32", "nf4", "int4")])
    assert list(results) == ["fp32", "nf4", "int4"]
    assert (computed(results["fp32"]).ok, computed(results["int4"]).ok) == (True, True)
    died = results["nf4"]
    assert died.error is None
    assert "code 1: Error no kernel image is available" in died.fault  # the library's own words


@pytest.mark.slow
def test_after_an_unusable_context_comes_a_new_process(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losing_context.py").write_text(LOSES_ITS_CONTEXT, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    found = compute([Computation(kind, "losing_context:use", {"kind": kind}) for kind in "abcd"])
    assert [(result.name, bool(result.fault), result.message) for result in found.values()] == [
        ("a", False, "a"), ("b", True, ""), ("c", True, ""), ("d", False, "d")]
    assert "illegal memory access" in found["c"].fault  # which only shows when it is waited for


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed for another layout, every row is another row's."""
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    monkeypatch.setattr(grouped.torch.ops.aten, "_convert_weight_to_int4pack_for_cpu",
                        lambda codes, tiles: pack(codes.flip(0).contiguous(), tiles))
    found = tried("int4")
    assert not found.ok
    assert found.found.startswith("results are wrong by")


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 0.2])
def test_an_error_that_is_no_small_number_is_a_finding(error: float) -> None:
    limit = TOLERANCE["bf16"]
    assert computed(ComputationResult("x", limit, "bf16")) == Finding("x", "ok", error=limit)
    found = computed(ComputationResult("x", error, "bf16"))
    assert (found.ok, found.error) == (False, error if error == 0.2 else None)


def test_every_number_of_rows_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may be wrong beyond the rows of one tile."""
    monkeypatch.setattr(kernel_check.functional, "linear",
                        lambda x, weight: torch.cat([x[:16] @ weight.mT, 0 * x[16:] @ weight.mT]))
    assert tried("fp32", rows=(1, 16)).ok
    assert not tried("fp32", rows=(1, 16, 17)).ok


def test_what_a_kernel_raises_is_a_finding() -> None:
    found = tried("bf16", "meta")  # there is no result to copy from it
    assert not found.ok
    assert "meta" in found.found
    slow = compute([wished("fp32", timeout_s=0.01)])
    assert computed(slow["fp32"]) == Finding("fp32", "failed", "no answer in 0 s")


@pytest.mark.parametrize(("kind", "dtype", "device", "rounds_to"), [
    ("int4", "bf16", "cpu", "bf16"), ("int4", "fp16", "cpu", "fp16"), ("int4", "fp32", "cpu", "fp32"),
    ("fp16", "bf16", "cpu", "fp16"), ("nf4", "fp16", "cpu", "fp16")])
def test_the_type_that_a_product_rounds_to(kind: str, dtype: str, device: str, rounds_to: str) -> None:
    assert computed_in(kind, dtype, torch.device(device)) == rounds_to


def test_on_a_gpu_int4_is_allowed_the_rounding_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel converts fp16 activations to bf16 and rounds its result to bf16.  The same done here,
    with the trial's own numbers, is further from float64 than fp16's rounding explains, and within what is
    allowed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 7))
    assert computed_in("int4", "fp16", torch.device("cuda")) == "bf16"

    class InBf16(torch.nn.Module):
        def __init__(self, linear: torch.nn.Module) -> None:
            super().__init__()
            self.linear = linear

        def fill(self, stored: dict[str, torch.Tensor]) -> None:
            self.linear.fill(stored)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.linear(x.bfloat16())).to(x.dtype)

    ordinary = grouped.GroupedScheme.linear
    monkeypatch.setattr(grouped.GroupedScheme, "linear",
                        lambda self, rows, columns, bias, dtype, device: InBf16(
                            ordinary(self, rows, columns, bias, torch.bfloat16, device)))
    error = kernel_check.product("int4", "cpu", (1024, 1024), (1, 16), "fp16").error
    assert 2**-9 < error < 2**-7  # of bf16: half a unit in the last place is 2**-9
    assert TOLERANCE["bf16"] == 2**-6


def report(device: str = "cpu", **ms: dict[int, float]) -> KernelReport:
    kinds = {kind: KindResult(Finding(kind, "ok", error=1e-3), times, 1000) if times
             else KindResult(Finding(kind, "failed", "broken"), {}, 0) for kind, times in ms.items()}
    return KernelReport(device, "a board", (64, 128), tuple(next(t for t in ms.values() if t)), "bf16", kinds,
                        copy_rate=4e6)


def test_the_fastest_is_judged_at_16_rows() -> None:
    found = report(bf16={1: 0.5, 16: 0.5}, int4={1: 1.0, 16: 3.0}, nf4={1: 2.0, 16: 2.0}, fp4={})
    assert (found.fastest, found.compared_rows) == ("nf4", 16)
    assert report(int4={1: 1.0, 8: 3.0, 64: 1.0}, nf4={1: 1.0, 8: 2.0, 64: 9.0}).fastest == "nf4"
    assert report(bf16={16: 1.0}, int4={}, nf4={}, fp4={}).fastest is None


def test_nf4_is_not_advised_for_an_orin() -> None:
    """bitsandbytes expands the whole matrix there, whatever these times say of one product."""
    times = {"bf16": {16: 0.5}, "int4": {16: 3.0}, "nf4": {16: 2.0}, "fp4": {}}
    orin = replace(report("cuda", **times), capability=(8, 7))
    assert (orin.fastest, orin.unadvised) == ("int4", ["nf4"])
    assert replace(report("cuda", **{**times, "int4": {}}), capability=(8, 7)).fastest is None
    other = replace(report("cuda", **times), capability=(11, 0))
    assert (other.fastest, other.unadvised) == ("nf4", [])
    assert orin.as_json()["compute_capability"] == [8, 7]
    assert advisable("nf4", None)


def test_the_file() -> None:
    found = json.loads(json.dumps(report("cuda", int4={1: 1.0, 16: 0.5}, nf4={}).as_json()))
    assert {key: found[key] for key in ("device", "shape", "rows", "fastest", "judged_at_rows")} == {
        "device": "cuda", "shape": [64, 128], "rows": [1, 16], "fastest": "int4", "judged_at_rows": 16}
    assert found["kinds"]["int4"] == {"works": True, "why": "", "error": 1e-3, "bytes": 1000,
                                      "ms": {"1": 1.0, "16": 0.5}, "bandwidth_share": {"1": 0.25, "16": 0.5}}
    assert found["kinds"]["nf4"]["why"] == "broken"
    assert found["torch"] == torch.__version__
    assert "bandwidth_share" not in report(int4={1: 1.0}).as_json()["kinds"]["int4"]


@without_cuda
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no CUDA device here; use --device cpu"):
        measure_kernels("cuda")


@pytest.mark.parametrize(("shape", "rows"), [
    ((60, 128), [1]), ((64, 96), [1]), ((64, 64), []), ((64, 64), [0]),
])
def test_products_that_cannot_be(shape: tuple[int, int], rows: list[int]) -> None:
    with pytest.raises(UsageError, match="give rows from 1 on, and a matrix of a multiple of 16 outputs"):
        measure_kernels("cpu", shape, rows)
