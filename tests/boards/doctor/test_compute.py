"""The doctor's checks that compute: this machine's own libraries, and broken ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flowspec_edge.boards.doctor.run import check_release
from flowspec_edge.boards.gpu_check.computations import ComputationResult
from flowspec_edge.boards.probe.compute_rules import (
    ComputeDevice,
    LibraryFacts,
    in_4_bits,
    libraries,
    right_product,
)
from flowspec_edge.boards.probe.facts import system_facts
from flowspec_edge.boards.probe.findings import merged


@pytest.mark.slow
def test_this_machines_libraries_do_real_products() -> None:
    findings = {finding.check: finding for finding in check_release(l4t="")}
    assert {name: finding.state for name, finding in findings.items()} == dict.fromkeys(
        ("flowspec", "torch", "gpu", "product", "4 bits", "encryption"), "ok"), findings


def test_a_library_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path.cwd()}")
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    _, torch, _ = check_release(l4t="36.4.3")
    assert (torch.check, torch.state, "libcudart.so.12" in torch.found) == ("torch", "failed", True)


TORCH = {"version": "2.8.0", "file": "torch/__init__.py", "numpy": "1.26.4", "cuda": [8, 7], "gpu": "Orin",
         "built_for": "12.6", "why": "", "numpy_fault": "", "gpu_fault": ""}
NO_GPU = {"cuda": None, "gpu": ""}


@pytest.mark.parametrize(("changes", "l4t", "check", "state", "says"), [
    ({}, "36.4.3", "gpu", "ok", "Orin, CUDA 12.6"),
    (NO_GPU, "", "gpu", "ok", "none: this machine computes on its CPU"),
    ({"gpu_fault": "no kernel image"}, "", "gpu", "failed", "fails: no kernel image"),
])
def test_what_torch_says_of_a_gpu(changes: dict[str, Any], l4t: str, check: str, state: str, says: str
                                  ) -> None:
    torch = system_facts({"torch": {**TORCH, **changes}}).torch
    asked = ComputeDevice(l4t=l4t, libraries=LibraryFacts("0", "4.57.0", "4.3.5", True, torch))
    found = {finding.check: finding for finding in merged(libraries(asked))}
    assert (found[check].state, says in found[check].found) == (state, True), found
    assert bool(found[check].advice) == (state == "failed")
    assert [name for name, finding in found.items() if finding.state == "failed"] == (
        [check] if state == "failed" else [])


ORIN_GPU, THOR_GPU = (8, 7), (11, 0)


@pytest.mark.parametrize(("works", "capability", "state", "advice"), [
    (("int4", "nf4"), ORIN_GPU, "ok", ""),
    (("int4",), ORIN_GPU, "warning", "shard models in int4, which needs no bitsandbytes"),
    (("nf4",), ORIN_GPU, "warning", "shard models in fp16: on this GPU bitsandbytes expands the whole"),
    ((), ORIN_GPU, "warning", "shard models in fp16"),
    (("nf4",), THOR_GPU, "warning", "shard models in nf4"),
    (("int4",), THOR_GPU, "warning", "shard models in int4, which needs no bitsandbytes, or build"),
    ((), THOR_GPU, "warning", "shard models in fp16, or build bitsandbytes for this GPU: cmake"),
    (("nf4",), None, "warning", "shard models in nf4"),
])
def test_the_4_bit_kind_that_is_advised(works: tuple[str, ...], capability: tuple[int, int] | None,
                                        state: str, advice: str) -> None:
    """Never nf4 for an Orin."""
    done = [ComputationResult("fp16", 1e-4, "fp16"), ComputationResult("fp32", 1e-6, "fp32"),
            *(ComputationResult(kind, fault="" if kind in works else "no kernel image") for kind in ("int4", "nf4"))]
    device = ComputeDevice("cuda" if capability else "cpu", capability, results={one.name: one for one in done})
    [product], [four] = right_product(device), in_4_bits(device)
    assert (product.state, four.state) == ("ok", state)
    assert four.advice.startswith(advice)
    assert bool(four.advice) == bool(advice)
    assert all(f"{kind} works" in four.found or four.state == "ok" for kind in works)
    if capability == ORIN_GPU:
        assert "in nf4" not in four.advice
        assert "build" not in four.advice
