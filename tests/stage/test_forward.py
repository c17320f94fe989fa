"""How far a pass runs ahead of its device, when it polls, and the memory layout of its masks on CUDA."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from kits.int4_matrices import DEVICES
from kits.stages import Book, admit, engines, random_tokens
from kits.tiny_models import tiny_llama
from torch.nn.attention import SDPBackend

from flowspec_edge.messages import Cancel, Output, Prune
from flowspec_edge.stage.forward import AHEAD, LaunchPacer, to_host
from flowspec_edge.stage.layers import attention
from flowspec_edge.stage.layers.attention import PathMask, SharedMask, additive, attend, kernel_of
from flowspec_edge.util.tensors import to_device
from flowspec_edge.util.torchdevice import use_exact_kernels

LAYERS = 6


class Queue:
    """The slowest possible device: it does enqueued work only when it is waited for."""

    def __init__(self) -> None:
        self.enqueued = 0
        self.done = 0
        self.log: list[str] = []

    def record(self) -> Reached:
        self.enqueued += 1
        self.log.append(f"enqueue {self.enqueued}")
        return Reached(self, self.enqueued)


class Reached:
    def __init__(self, queue: Queue, step: int) -> None:
        self._queue = queue
        self._step = step

    def synchronize(self) -> None:
        assert self._step == self._queue.done + 1  # in order, and each once
        self._queue.done = self._step
        self._queue.log.append(f"done {self._step}")


def test_the_host_runs_two_layers_ahead() -> None:
    queue = Queue()
    pace = LaunchPacer(queue.record)
    for step in range(1, LAYERS + 1):
        pace.enqueued()
        assert queue.done == max(0, step - AHEAD)
    asked: list[int] = []
    assert pace.finish(lambda: asked.append(queue.done) is None)
    assert asked == [LAYERS - 1, LAYERS]


def test_a_pass_that_is_given_up_is_not_waited_for() -> None:
    queue = Queue()
    pace = LaunchPacer(queue.record)
    for _ in range(LAYERS):
        pace.enqueued()
    assert not pace.finish(lambda: False)
    assert queue.done == LAYERS - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=LAYERS, hidden=32)


@pytest.mark.parametrize("cancel_at", range(LAYERS + 3))
def test_a_cancel_counts_until_the_device_is_done(model: Path, cancel_at: int,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll before each layer, and after each of the last three steps: two layers and the copy out.

    Cancelled at any of them, the run comes out empty and the cache is as it was."""
    queue = Queue()
    monkeypatch.setattr(LaunchPacer, "for_device", lambda device: LaunchPacer(queue.record))
    (engine,) = engines(model, 1)
    admitted = admit(engine, Book().text(random_tokens(5, 97, seed=1)))
    polls: list[int] = []

    def poll() -> None:
        if len(polls) == cancel_at:
            engine.cancel(Cancel(1, 0, (admitted.run,)))
        polls.append(queue.done)

    _, output, *_ = engine.compute([admitted], poll)[0]
    full = [max(0, layer - AHEAD) for layer in range(LAYERS)] + [LAYERS, LAYERS + 1]
    assert isinstance(output, Output)
    if cancel_at < len(full):
        assert polls == full[: cancel_at + 1]
        assert len(output.numbers) == len(output.hidden.array) == engine.cached(1) == 0
        assert engine.counters["cancelled"] == 1
    else:
        assert polls == full
        assert len(output.numbers) == engine.cached(1) == 5


def test_rows_pruned_while_the_device_is_waited_for_are_not_sent(model: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    monkeypatch.setattr(LaunchPacer, "for_device", lambda device: LaunchPacer(queue.record))
    (engine,) = engines(model, 1)
    book = Book()
    engine.compute([admit(engine, book.text([5, 6, 7]))])
    kept, lost = (book.add(token, book.committed[-1]) for token in (8, 9))
    admitted = admit(engine, book.builder.seal())
    queue.done = queue.enqueued = 0

    def poll() -> None:
        if queue.done == LAYERS + 1:
            engine.prune(Prune(1, 0, 0, lost, lost + 1, np.empty(0, np.int32)))

    _, output, *_ = engine.compute([admitted], poll)[0]
    assert output.numbers.tolist() == [kept]
    assert engine.cache_of(1) is not None
    assert engine.cache_of(1).numbers.tolist() == [0, 1, 2, kept]


@pytest.mark.parametrize("device", DEVICES)
def test_copies_there_and_back(device: str) -> None:
    tensors = [torch.randn(5, 3), torch.arange(7), torch.zeros(0, 4)]
    there = [to_device(tensor, torch.device(device)) for tensor in tensors]
    pace = LaunchPacer.for_device(torch.device(device))
    back = to_host(there)
    pace.enqueued()
    assert pace.finish(lambda: True)
    for tensor, copy in zip(tensors, back, strict=True):
        assert torch.equal(tensor, copy)


def arguments(rows: int, columns: int, groups: int, device: str, dtype: torch.dtype
              ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Queries [rows, heads, 64], keys and values as from a cache of 300 slots, and what the rows see."""
    torch.manual_seed(columns)
    visible = np.random.default_rng(rows).random((rows, columns)) < 0.5
    visible[:, -1] = True
    queries = torch.randn(rows, 2 * groups, 64, dtype=dtype, device=device)
    return queries, torch.randn(2, 300, 2, 64, dtype=dtype, device=device)[:, :columns], visible


def computed(queries: torch.Tensor, held: torch.Tensor, visible: np.ndarray, sinks: torch.Tensor | None
             ) -> torch.Tensor:
    """In float64: [rows, heads, 64]."""
    keys, values = held.double().repeat_interleave(queries.shape[1] // held.shape[2], 2).transpose(1, 2)
    scores = (queries.double().transpose(0, 1) @ keys.mT / 8).masked_fill(torch.from_numpy(~visible), float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(visible), 1)), -1)
    return (scores.softmax(-1)[..., : visible.shape[1]] @ values).transpose(0, 1)


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 100, 255])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_masks_are_right(rows: int, groups: int, columns: int) -> None:
    queries, held, visible = arguments(rows, columns, groups, "cpu", torch.float32)
    sinks = torch.randn(2 * groups)
    for own in (None, sinks):
        for unfused in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                if unfused:
                    patch.setattr(attention, "_kernel", attention._unfused)
                for mask in (SharedMask(visible, groups, torch.float32, torch.device("cpu")),
                             PathMask(visible, 0, None, torch.float32, torch.device("cpu"), 16)):
                    out = attend(torch.cat((queries, queries[:1])), held, mask, queries.shape[-1] ** -0.5, own)
                    expected = computed(queries, held, visible, own)
                    torch.testing.assert_close(out[:-1].double(), expected, atol=1e-5, rtol=1e-5)
                    assert not out[-1].any()  # padding


def test_masks_are_aligned() -> None:
    """CUDA's kernel takes masks whose strides but the last are multiples of 8."""
    for columns in (1, 7, 8, 9, 100):
        mask = additive(np.ones((3, columns), dtype=bool), torch.float32, torch.device("cpu"))
        assert mask.shape == (3, columns)
        assert mask.stride(0) % 8 == 0
        assert mask.stride(1) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_fused_kernel_is_chosen(device: str) -> None:
    """The CPU has one kernel with masks, CUDA two; cuDNN's would be planned for each length."""
    use_exact_kernels()
    dtype, wanted = ((torch.float32, SDPBackend.FLASH_ATTENTION) if device == "cpu" else
                     (torch.float16, SDPBackend.EFFICIENT_ATTENTION))
    assert kernel_of(torch.device(device), dtype, 64) == wanted
    assert not torch.backends.cuda.cudnn_sdp_enabled()
