"""The device that ``--device`` selects, on machines given by their properties, and on this one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kits.torch_devices import needs_cuda, without_cuda

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util import procfs
from flowspec_edge.util.torchdevice import (
    TorchGpu,
    architectures,
    gpus,
    memory_errors,
    pick,
    require,
    runs_on,
    use_exact_kernels,
)

GB = 10**9
ORIN = TorchGpu("Orin", (8, 7), 6 * GB, 8 * GB)
SERVER = TorchGpu("A100", (8, 0), 70 * GB, 80 * GB)
OLD = TorchGpu("Tesla M60", (5, 2), 8 * GB, 8 * GB)
BUILT = ["sm_75", "sm_80", "sm_90", "compute_90"]


@pytest.mark.parametrize(("capability", "built", "runs"), [
    ((8, 7), ["sm_80"], True),  # machine code runs on later minor versions
    ((8, 0), ["sm_87"], False),
    ((9, 0), ["sm_80", "sm_86"], False),  # and on no other major one
    ((9, 0), ["sm_80", "compute_80"], True),  # PTX does
    ((7, 5), ["compute_80"], False),
    ((5, 2), BUILT, False),
    ((9, 0), ["sm_90a"], True),
    ((12, 0), ["sm_120"], True),
    ((8, 0), [], False),
])
def test_capabilities(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert runs_on(capability, built) is runs


@pytest.mark.parametrize(("asked", "found", "needed", "device"), [
    ("cpu", [SERVER], 0, "cpu"),
    ("auto", [], 0, "cpu"),
    ("auto", [SERVER], 70 * GB, "cuda:0"),
    ("auto", [SERVER], 70 * GB + 1, "cpu"),
    ("auto", [OLD, ORIN, SERVER], 10 * GB, "cuda:2"),
    ("cuda", [SERVER, ORIN], GB, "cuda:0"),
    ("cuda:1", [SERVER, ORIN], GB, "cuda:1"),
])
def test_what_is_picked(asked: str, found: list[TorchGpu], needed: int, device: str) -> None:
    picked, why = pick(asked, found, BUILT, needed)
    assert picked == device
    assert bool(why) == (device == "cpu" and asked == "auto" and bool(found))


@pytest.mark.parametrize(("asked", "found", "says"), [
    ("cuda:2", [SERVER, ORIN], ["--device cuda:2", "no such GPU", "cuda:0 (A100), cuda:1 (Orin)"]),
    ("cuda:1", [SERVER, ORIN], ["big takes about 7.0 GB", "cuda:1 (Orin) has 6.0 of 8.0 GB", "--device cpu"]),
    ("cuda", [OLD], ["no kernels for cuda:0 (Tesla M60, compute capability 5.2)", "sm_75", "--device cpu"]),
])
def test_what_cannot_be_had_says_why(asked: str, found: list[TorchGpu], says: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        pick(asked, found, BUILT, 7 * GB, "big")
    assert all(part in str(caught.value) for part in says)
    assert "\n" not in str(caught.value)


def test_auto_says_why_a_gpu_is_left_out() -> None:
    assert "big takes about 7.0 GB" in pick("auto", [ORIN], BUILT, 7 * GB, "big")[1]


@without_cuda
def test_without_a_gpu() -> None:
    assert gpus() == []
    with pytest.raises(UsageError, match=r"^--device cuda: .*(without CUDA|no GPU).*compute on the CPU .*$"):
        pick("cuda", gpus(), architectures(), 0)


def test_the_gpus_that_pytorch_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card, and a Jetson's GPU, where memory that the system can reclaim is free, too."""
    about = [SimpleNamespace(name="card", major=8, minor=6, is_integrated=False),
             SimpleNamespace(name="Orin", major=8, minor=7, is_integrated=True)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: about[device.index if isinstance(device, torch.device) else device])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1000, 2000))
    card, board = gpus()
    assert card == TorchGpu("card", (8, 6), 1000, 2000)
    assert (board.name, board.capability, board.total) == ("Orin", (8, 7), 2000)
    assert board.free > 1 << 20  # this system's memory
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1 << 60, 1 << 60))
    assert [gpu.free for gpu in gpus()] == [1 << 60] * 2
    assert require("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UsageError, match=r"^no cuda:2 here: there are 2 GPUs, counted from cuda:0$"):
        require("cuda:2")


@pytest.mark.parametrize(("error", "told"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8.00 GiB\n"),
     "CUDA out of memory"),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported at another call.\n"),
     "CUDA error: out of memory"),
    (RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "allocator.cpp":838, please report a bug'),
     "NVML_SUCCESS == r"),  # a Jetson
    (MemoryError(), "an allocation failed"),
])
def test_memory_that_runs_out_is_one_line(error: Exception, told: str) -> None:
    with pytest.raises(FlowspecError) as caught, memory_errors("cuda:0"):
        raise error
    assert str(caught.value).startswith(f"cuda:0 is out of memory ({told}")
    assert "): use --dtype fp16" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_errors_are_not_of_memory() -> None:
    with pytest.raises(RuntimeError, match="illegal"), memory_errors("cuda:0"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("integrated", [False, True])
def test_a_gpu_that_is_full_has_nothing_free(integrated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no context fits, which CUDA needs to tell how much is free."""
    def refuse(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory")

    facts = SimpleNamespace(name="Full", major=8, minor=6, total_memory=8 * GB, is_integrated=integrated)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    monkeypatch.setattr(procfs, "sizes", lambda path: {"MemAvailable": 3 * GB})
    assert gpus() == [TorchGpu("Full", (8, 6), 3 * GB if integrated else 0, 8 * GB)]


@needs_cuda
def test_the_gpu_that_is_there() -> None:
    found = gpus()
    assert all(0 < gpu.free <= gpu.total for gpu in found)
    assert pick("cuda", found, architectures(), 1) == ("cuda:0", "")
    with pytest.raises(FlowspecError, match="out of memory"), memory_errors("cuda:0"):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda:0")


def test_exact_kernels_round_no_sums_on_the_way() -> None:
    use_exact_kernels()
    matmul = torch.backends.cuda.matmul
    assert not matmul.allow_tf32
    assert not matmul.allow_fp16_reduced_precision_reduction
    assert not matmul.allow_bf16_reduced_precision_reduction
