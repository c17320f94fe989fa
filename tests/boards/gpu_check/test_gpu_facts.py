"""What explains a GPU's speed and memory: by real child processes, real refusals, and an Orin's files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kits.int4_matrices import DEVICES
from kits.torch_devices import without_cuda
from packaging.version import Version

from flowspec_edge.boards.gpu_check import gpu_facts
from flowspec_edge.boards.gpu_check.computations import Computation, attempt
from flowspec_edge.boards.gpu_check.gpu_facts import has_kernel
from flowspec_edge.boards.probe.checks import CHECKS, judge
from flowspec_edge.boards.probe.compute_rules import (
    ComputeDevice,
    allocator,
    free_memory,
    largest_piece,
    pieces,
    report_only,
)
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.util import procfs
from flowspec_edge.util.torchdevice import use_exact_kernels

EXPANDABLE = "max_split_size_mb:64, expandable_segments : True"
LARGEST = tuple(check for check in CHECKS if check.name == "largest piece")
REFUSED = """
import json, resource
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
from flowspec_edge.boards.probe.checks import CHECKS, judge
from flowspec_edge.boards.probe.compute_rules import ComputeDevice
largest = [check for check in CHECKS if check.name == "largest piece"]
for available in (20 * 10**9, 400 * 10**6):
    [found] = judge("device", ComputeDevice("cpu", available=available), largest)
    print(json.dumps(found.as_json()))
"""
MEMINFO = "MemTotal: 7802680 kB\nMemFree:          500000 kB\nMemAvailable:    3000000 kB\n"


def memory(path: Path, text: str) -> dict[str, int]:
    path.write_text(text)
    return procfs.sizes(path)


@pytest.mark.slow
def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in judge("device", ComputeDevice(
        "cpu", l4t="36.5.0", memory=memory(tmp_path / "meminfo", MEMINFO),
        environment={"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}))}
    assert list(found) == ["attention fp32", "attention fp16", "attention bf16", "rms_norm", "launch",
                           "free memory", "gpu memory", "allocator"]
    assert {name for name, finding in found.items() if finding.state != "ok"} == {"gpu memory", "allocator"}
    assert re.fullmatch(r"[\d.]+ µs of the host for an addition from Python", found["launch"].found)
    assert found["free memory"].found.startswith("MemFree 512 MB, MemAvailable 3,072 MB: the difference is")
    assert "256 MB at once" in found["gpu memory"].found


def test_free_memory_as_the_kernel_says(tmp_path: Path) -> None:
    assert free_memory(ComputeDevice()).state == "unknown"
    alike = memory(tmp_path / "meminfo", "MemFree:         2900000 kB\nMemAvailable:    3000000 kB\n")
    assert free_memory(ComputeDevice(memory=alike)).found == "MemFree 2,970 MB, MemAvailable 3,072 MB"


@pytest.mark.parametrize(("l4t", "environment", "failed"), [
    ("36.4.3", {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}, True),
    ("36.4.3", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
    ("36.4.3", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
    ("36.4.3", {}, False), ("", {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}, False)])
def test_an_allocator_that_fails_on_a_jetson(l4t: str, environment: dict[str, str], failed: bool) -> None:
    found = allocator(ComputeDevice(l4t=l4t, environment=environment))
    assert [finding.state for finding in found] == ["failed"] * failed


@pytest.mark.slow
def test_the_largest_piece_is_found_by_halves() -> None:
    """The system refuses pieces beyond 6 GB of addresses, of which a process with torch uses some itself."""
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    limited, small = map(json.loads, done.stdout.splitlines())
    size, beyond = re.fullmatch(r"([\d,]+) MB at once; ([\d,]+) MB: .*can't allocate memory.*", limited["found"]
                                ).groups()  # type: ignore[union-attr]
    assert (size, beyond, limited["state"]) in [("5,000", "10,000", "ok"), ("2,500", "5,000", "ok"),
                                                ("1,250", "2,500", "ok")]
    assert (small["state"], small["found"]) == ("ok", "400 MB at once, all that is free")
    [none] = judge("device", ComputeDevice(available=100 * 10**6), LARGEST)
    assert none.found.startswith("only 100 MB are available")


@pytest.mark.parametrize(("printed", "error", "reason"), [
    (b"NvMapMemAllocInternalTagged: 1075072515 error 12\n", RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED"),
     "NvMapMemAllocInternalTagged: 1075072515 error 12"),
    # As PyTorch 2.11 wrote it on a GPU that other processes used, too.
    (b"", torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 74.18 GiB. GPU 0 has a total capacity of 79.18 GiB of which "
        "73.04 GiB is free. Process 594 has 878.00 MiB memory in use."), "CUDA out of memory")])
def test_no_piece_is_large_enough(printed: bytes, error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
                                  ) -> None:
    """What NvMap prints is the reason, else torch's first sentence."""
    def refuse(*size: int, **options: object) -> torch.Tensor:
        os.write(2, printed)
        raise error

    monkeypatch.setattr(gpu_facts.torch, "empty", refuse)
    device = ComputeDevice(available=10**9)
    tried = {one.name: attempt(one) for one in pieces(device)}
    assert {result.fault for result in tried.values()} == {reason}
    assert [*largest_piece(replace(device, results=tried))] == [Finding(
        "largest piece", "failed", f"not even 256 MB at once, which models need: {reason}")]


def test_what_a_driver_prints_is_heard_and_stderr_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    with gpu_facts._capture_stderr() as lines:
        subprocess.run(["sh", "-c", "echo from C >&2"], check=True)
    os.write(2, b"afterwards\n")
    assert lines == ["from C"]
    assert capfd.readouterr().err == "afterwards\n"


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_that_torch_takes(device: str) -> None:
    """An arbitrary mask leaves the efficient kernel alone on CUDA; rms_norm is one kernel from 2.9 on."""
    use_exact_kernels()
    for dtype in ("fp32", "fp16", "bf16"):
        found = gpu_facts.attention(device, dtype)
        if device == "cuda":
            assert "efficient attention" in found
    if device == "cuda":
        fused = Version(torch.__version__) >= Version("2.9")
        assert has_kernel("aten::_fused_rms_norm", "CUDA") == fused
        assert ("one kernel" in gpu_facts.rms_norm(device)) == fused
    assert has_kernel("aten::mm", "CPU")
    assert not has_kernel("aten::never_heard_of", "CPU")


@pytest.mark.parametrize("device", DEVICES)
def test_the_price_of_a_launch(device: str) -> None:
    """No run of all its launches is shorter than the process' own time for the shortest."""
    start = time.perf_counter()
    found = gpu_facts.launch_us(device)
    passed = time.perf_counter() - start
    assert 0 < found * 1e-6 * gpu_facts._LAUNCHES * (gpu_facts._RUNS + 1) / 2 < passed


@without_cuda
def test_without_graphs_their_price_is_skipped() -> None:
    found = report_only(attempt(Computation("launch in a graph", f"{gpu_facts.__name__}:launch_in_graph",
                                            {"device": "cuda"})))
    assert (found.state, bool(found.found)) == ("skipped", True)
