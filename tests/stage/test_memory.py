"""Too little memory: an error of one line, before Linux kills a process where the GPU shares the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kits.stages import Book, admit, engines
from kits.torch_devices import needs_cuda

from flowspec_edge.errors import FlowspecError
from flowspec_edge.messages import Open
from flowspec_edge.stage import forward
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.preparation import warm_up
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.util.torchdevice import allocation, available_bytes

# The message of PyTorch 2.5 on a Jetson that is out of memory.
TEGRA = ('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/pytorch/c10/cuda/CUDACachingAllocator.cpp":838, '
         "please report a bug to PyTorch. ")
NVMAP = "NvMapMemAllocInternalTagged: 1075072515 error 12"  # of L4T 36.4.7 and newer, though memory is free


def failing(error: Exception) -> object:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
                                   RuntimeError(TEGRA), RuntimeError(NVMAP),
                                   RuntimeError("CUDA error: out of memory\nmore"),
                                   RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
                                   MemoryError()])
def test_any_way_to_fail_is_one_line(error: Exception, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (engine,) = engines(model, 1)
    admitted = admit(engine, Book().text([1, 2, 3]))
    monkeypatch.setattr(forward, "to_host", failing(error))
    with pytest.raises(FlowspecError, match=r"^no memory for computing 3 rows with 0 in the cache: lower the "
                                            r"limits of the session, or give this stage fewer layers$"):
        engine.compute([admitted])


@pytest.mark.parametrize("text", ["shapes cannot be multiplied", "CUBLAS_STATUS_EXECUTION_FAILED"])
def test_other_errors_stay_what_they_are(text: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (engine,) = engines(model, 1)
    admitted = admit(engine, Book().text([1, 2, 3]))
    monkeypatch.setattr(forward, "to_host", failing(RuntimeError(text)))
    with pytest.raises(RuntimeError, match=text):
        engine.compute([admitted])


def test_a_real_allocation_that_fails() -> None:
    with (pytest.raises(FlowspecError, match=r"no memory for everything \(576460752303 MB\): use less"),
          allocation("everything", 1 << 59, "use less")):
        torch.empty(1 << 59, dtype=torch.uint8)


@pytest.mark.parametrize("rows", [1 << 40, 1 << 58])
def test_an_open_says_how_much_it_wanted(rows: int, model: Path) -> None:
    (engine,) = engines(model, 1)
    wanted = 4 * 2 * rows * 2 * 8 * 4  # layers, keys and values, rows, heads, head_dim, bytes
    with pytest.raises(FlowspecError, match=rf"^no memory for a KV cache of {rows} rows "
                                            rf"\({wanted / 1e6:.0f} MB\): lower the limits"):
        engine.open(Open(2, 0, rows))


def test_what_is_available_is_looked_up_where_it_matters(tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:        7633812 kB\nMemAvailable:    1048576 kB\n")
    assert available_bytes(torch.device("cpu"), meminfo) is None
    for integrated, available in ((True, 1 << 30), (False, None)):
        properties = type("Properties", (), {"is_integrated": integrated})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        assert available_bytes(torch.device("cuda"), meminfo) == available
    entered = []
    with allocation("a KV cache of 256 rows", (1 << 30) - (128 << 20), "use less", available=1 << 30):
        entered.append(True)
    with (pytest.raises(FlowspecError, match=r"^no memory for a KV cache of 256 rows \(940 MB\): 1074 MB are "
                                             r"available, of which 134 are left to the system; use less$"),
          allocation("a KV cache of 256 rows", (1 << 30) - (128 << 20) + 1, "use less", available=1 << 30)):
        entered.append(False)
    assert entered == [True]


def test_on_a_jetson_it_says_what_was_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree:          500000 kB\nMemAvailable:    3000000 kB\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shared = (" (512 MB are free and 3072 MB available, but CUDA may not get what the page cache holds, and "
              "L4T 36.4.7 and newer may refuse a large piece of free memory)")
    for integrated, why in ((True, shared), (False, "")):
        properties = type("Properties", (), {"is_integrated": integrated})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        with (pytest.raises(FlowspecError) as refused,
              allocation("a KV cache", 929_000_000, "use less", available=3 << 30, meminfo=meminfo)):
            raise RuntimeError(NVMAP)
        assert str(refused.value) == f"no memory for a KV cache (929 MB){why}: use less"


@needs_cuda
def test_sessions_take_no_memory_of_a_gpu(model: Path) -> None:
    """Nor does a session that takes over rows, or one that makes the others move."""
    engine = StageEngine(load_shard(model, 0, 1, "fp16", "cuda"), 1000)
    warm_up(engine)
    before = torch.cuda.memory_reserved(), engine.cache_bytes
    for session in range(1, 9):
        engine.open(Open(session, 0, 300 + 10 * session, concurrent=(session - 1,)))
    assert (torch.cuda.memory_reserved(), engine.cache_bytes) == before


def test_rows_that_do_not_fit_are_an_error_at_the_start(model: Path) -> None:
    with pytest.raises(FlowspecError, match=r"^no memory for KV caches of \d+ rows \(\d+ MB\): lower the"):
        StageEngine(load_shard(model, 0, 1, "fp32"), 1 << 58)
