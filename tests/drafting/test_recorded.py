"""Recorded draft passes: the drafts of passes one by one, on memory that never moves.

On a CPU ``kits.graph_recorder`` stands in for CUDA graphs: it repeats a pass's operations on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.cases import DISTINCT
from kits.graph_recorder import record
from kits.tiny_model_dir import tiny_eagle3, tiny_model_dir
from kits.torch_devices import needs_cuda
from strictdevice import allocations, counting

from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.load import SharedMemory, load_drafters
from flowspec_edge.drafting.recorded import ROWS, PassGraphs, fitting
from flowspec_edge.drafting.tree_cache import CacheMemory, CacheShape, TreeCache
from flowspec_edge.drafting.tree_drafter import TreeDrafter
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.messages import Tap
from flowspec_edge.model.candidates import Candidates
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.layers.kinds import KeysValues
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest
from flowspec_edge.util import graphs
from flowspec_edge.util.graphs import CudaRecorder
from flowspec_edge.util.tensors import from_torch

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
KINDS = ["eagle2", "eagle3", "lm"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.strict)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2)
    tiny_eagle3(path)
    return path


@pytest.fixture(autouse=True)
def every_recording_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeating operations from Python takes longer than computing."""
    monkeypatch.setattr(graphs, "_NOISE", 1e9)


def drafters(model: Path, kind: str, device: str, memory: SharedMemory | None = None,
             candidates: Candidates | None = None) -> Callable[[], Drafter]:
    models = DraftModels(model, "fp32", device)
    head = models._lm_head.head
    embedding = torch.randn(head.vocabulary, head.hidden_size, generator=torch.Generator().manual_seed(0))
    return load_drafters(kind, model, head, embedding.to(device), "fp32", 2, memory=memory,
                         candidates=candidates)


def read(drafter: Any, tokens: list[int], device: str) -> None:
    """``tokens`` as the text of a new session."""
    drafter.reset(Sampling(), "draft", 1.0)
    width = drafter.pass_model.width
    states = torch.randn(len(tokens) - 1, width, generator=torch.Generator().manual_seed(1))
    for layer in drafter.taps:
        drafter.tap(Tap(0, 0, 0, layer, np.arange(len(states), dtype=np.int32), from_torch(states)))
    drafter.commit(tokens[:1], None)
    drafter.commit(tokens[1:], states.to(device), range(len(states)))


def drafted(drafter: Any, text: int, children: int = 4) -> list[tuple[list[int], list[float]]]:
    """Tokens and scores of the root's children and of theirs."""
    found, nodes = [], [DraftNode(0, -1, 1, text - 1)]
    for level in range(3):
        got = drafter.expand(DraftRequest(0, tuple(nodes), children))
        found.append((got.tokens.flatten().tolist(), got.scores.flatten().tolist()))
        nodes = [DraftNode(100 * level + i + 1, nodes[0].id, int(token), text + level)
                 for i, token in enumerate(got.tokens[0])]
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "candidates"), [*((kind, None) for kind in KINDS), ("eagle2", Candidates(16, 8))])
def test_the_drafts_of_passes_one_by_one(model: Path, kind: str, candidates: Candidates | None, device: str) -> None:
    """For texts below and beyond the first width, in sessions one after another and beside others."""
    memory = SharedMemory(1000, record)
    make, alone = (drafters(model, kind, device, where, candidates) for where in (memory, None))
    assert memory.choice is not None
    assert (sorted(memory.choice.ms), memory.choice.reason) == ([*ROWS], "")
    assert str(memory.choice).startswith("CUDA graphs: 16 rows ")
    others = [make(), make()]
    read(others[0], [5] * 7, device)
    drafted(others[0], 7)  # takes rows before and among those of what follows
    for length in (3, 250, 300):
        text = np.random.default_rng(length).integers(0, 60, length).tolist()
        one, other = make(), alone()
        for drafter in (one, other):
            read(drafter, text, device)
        found = (drafted(drafter, length) for drafter in (one, other))
        for (tokens, scores), (expected, its) in zip(*found, strict=True):
            np.testing.assert_allclose(scores, its, atol=2e-5)
            assert tokens == expected


@pytest.fixture(scope="module")
def clusters() -> list[VirtualCluster]:
    """As it is, and with recorded passes."""
    plain, recorded = (VirtualCluster(DEMO, 3, load_profile("paper-7b")) for _ in range(2))
    recorded._model.sessions = DraftModels(DEMO, "fp32", "cpu", cache_rows=1500, record=record)
    return [plain, recorded]


@pytest.mark.parametrize(("strategy", "sampling"), [
    pytest.param(name, sampling, marks=() if name in DISTINCT else pytest.mark.soak) for name, sampling in zip(
        STRATEGIES, cycle([Sampling(), Sampling(1.0, top_p=0.9, seed=1)]), strict=False)])
def test_tokens_of_every_strategy(clusters: list[VirtualCluster], strategy: str, sampling: Sampling,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = count(), PassGraphs.run
    monkeypatch.setattr(PassGraphs, "run", lambda *given: (next(runs), run(*given))[1])
    request = Request(list(b"def f(n):\n"), strategy, 8, sampling)
    plain, recorded = (cluster.generate(request) for cluster in clusters)
    assert recorded.tokens == plain.tokens
    assert next(runs) > 0 or STRATEGIES[strategy].drafter in (None, "spd")


def test_requests_together(clusters: list[VirtualCluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two requests are one recorded pass."""
    rows, run = set[int](), PassGraphs.run
    monkeypatch.setattr(PassGraphs, "run", lambda graphs, inputs, asked: (rows.add(len(inputs.tokens)),
                                                                         run(graphs, inputs, asked))[1])
    given = [Request(list(b"def f(n):\n"), "flowspec", 8, Sampling(temperature, seed=2))
             for temperature in (0.0, 1.0, 0.0)]
    plain, recorded = (cluster.generate_many(given) for cluster in clusters)
    assert [result.tokens for result in recorded] == [result.tokens for result in plain]
    assert max(rows) > 16


@pytest.mark.strict
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_launched_beside_the_graphs(model: Path, kind: str) -> None:
    """One wait a pass, for its ids and scores; nothing is kept that was not there before."""
    inside = 0

    def counted(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        made, repeat = record(work)

        def replay() -> None:
            nonlocal inside
            with counting() as log:
                repeat()
            inside += log.launches.total() - 1  # a graph is one launch

        return made, replay

    make = drafters(model, kind, "cuda", SharedMemory(1000, counted))
    operations = []
    for length in (5, 300):
        drafter: Any = make()
        read(drafter, [1] * length, "cuda")
        drafted(drafter, length)
        nodes = tuple(DraftNode(500 + i, 0, i, length) for i in range(10))
        with counting() as warm:
            drafter.expand(DraftRequest(0, nodes, 10))
        nodes = tuple(DraftNode(600 + i, 0, i, length) for i in range(10))
        inside = 0
        with counting() as log:
            drafter.expand(DraftRequest(0, nodes, 10))
        assert log.launches.total() - inside <= {"eagle2": 6, "eagle3": 5, "lm": 5}[kind]
        assert [(event.kind, event.place) for event in log.waits] == [
            ("download, waits", "sampling/sampler.py:fetched")]
        assert len(log.of("upload")) == 2 + (kind != "eagle3")  # the others' embeddings are in a file
        assert warm.launches == log.launches
        operations.append([event.name for event in log.of("launch")])
        drafter.rewind(length, Sampling(), "draft", 1.0)
    assert operations[0] == operations[1]


@pytest.mark.strict
@pytest.mark.parametrize("draft", KINDS)
def test_no_memory_is_taken_after_the_start(model: Path, draft: str) -> None:
    """Requests of any length, one after the other and together, raise neither what is held nor the most."""
    cluster = VirtualCluster(model, 2, load_profile("paper-7b"), device="cuda")
    models = cluster._model.sessions = DraftModels(model, "fp32", "cuda", cache_rows=2500, record=record)
    models.pass_seconds(draft)
    held = models._drafters[draft]()._cache.memory  # type: ignore[attr-defined]
    rows, places = held.rows, [layer.data_ptr() for layer in held.layers]
    with allocations() as made:
        for length in (5, 600, 40):
            cluster.generate(Request([3, 7, 11] * length, "flowspec", 6, Sampling(), Params(draft=draft)))
    assert [layer.data_ptr() for layer in held.layers] == places
    assert not [event for event in made.events if event.place.startswith("drafting/tree_cache")]
    held.clear_returned()
    assert held.take(rows).size == held.rows == rows  # all have come back


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted when stream is capturing\nmore"),
                                   torch.OutOfMemoryError("CUDA out of memory.")])
def test_what_cannot_be_recorded_runs_as_before(model: Path, error: Exception) -> None:
    pieces = count()

    def fails(work: Callable[[], Any]) -> Any:
        if next(pieces) == 4:
            raise error
        return record(work)

    memory = SharedMemory(1000, fails)
    make, alone = drafters(model, "eagle2", "cpu", memory), drafters(model, "eagle2", "cpu")
    assert memory.choice is not None
    assert str(memory.choice) == ("draft passes run kernel by kernel: they cannot be recorded: "
                                  f"{str(error).splitlines()[0]}")
    for drafter in (one := make(), other := alone()):
        read(drafter, [1, 2, 3], "cpu")
    for (tokens, _), (expected, _) in zip(drafted(one, 3), drafted(other, 3), strict=True):
        assert tokens == expected


def test_other_results_are_noticed(model: Path) -> None:
    """A recorded pass that stops writing, after the start's first repetitions."""
    def forgets(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        made, repeat = record(work)
        times = iter(range(2))
        return made, lambda: repeat() if next(times, None) is not None else None

    memory = SharedMemory(300, forgets)
    drafters(model, "lm", "cpu", memory)
    assert memory.choice is not None
    assert memory.choice.reason == ("draft passes of 32 rows run kernel by kernel: recorded draft passes compute "
                                    "other results")


def test_a_memory_that_has_grown_is_not_the_recorded_one(model: Path) -> None:
    make = drafters(model, "lm", "cpu", SharedMemory(256, record))
    drafter: Any = make()
    read(drafter, [1] * 300, "cpu")
    assert fitting(drafter._recorded, 4) is drafter._recorded[16]
    drafted(drafter, 300)
    assert fitting(drafter._recorded, 4) is None


def test_rows_that_come_back_hold_nothing() -> None:
    """A session that overflowed leaves no NaN for another's mask to meet."""
    shape = CacheShape(KeysValues(1, 1, 4), 2, torch.float32, torch.device("cpu"))
    memory = CacheMemory(shape, 256)
    cache, other = TreeCache(shape, memory), TreeCache(shape, memory)
    placed = cache.begin(3, [(1, 0)])
    other.begin(2, [])
    cache.for_pass(placed).write(torch.full((4, 2, 1, 4), torch.nan), 1)
    assert not memory.layers[1].isfinite().all()
    cache.reset()
    placed = other.begin(1, [])
    assert memory.layers[1].isfinite().all()
    np.testing.assert_array_equal(np.flatnonzero(placed.visible[0]), [0, 4, 5])
    del cache, other
    memory.clear_returned()
    assert memory.take(256).size == 256


def test_a_session_goes_on_when_there_was_no_memory_for_more() -> None:
    """And nothing that was recorded before is used again: growing may have moved some of the layers."""
    shape = CacheShape(KeysValues(1, 1, 4), 2, torch.float32, torch.device("cpu"))
    memory = CacheMemory(shape, 256)
    cache, resized = TreeCache(shape, memory), memory.resized
    cache.begin(2, [(1, 0)])
    cache.reroot(1)
    with pytest.raises(RuntimeError):
        cache.begin(1 << 44, [])
    assert memory.resized > resized
    placed = cache.begin(1, [(2, 1)])
    assert (memory.rows, placed.rows.tolist(), cache.committed) == (256, [2, 3], 3)  # the dropped node's first


@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_cuda(model: Path, kind: str) -> None:
    memory = SharedMemory(1000, CudaRecorder(torch.device("cuda")))
    make = drafters(model, kind, "cuda", memory)
    assert memory.choice is not None
    assert (sorted(memory.choice.ms), memory.choice.reason) == ([*ROWS], "")
    drafter = make()
    assert isinstance(drafter, TreeDrafter)
    read(drafter, [1] * 300, "cuda")
    drafted(drafter, 300)
