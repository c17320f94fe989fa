"""Recorded layers: the same bits as layers one by one, and whether a stage uses them.

``test_kept`` plays sessions that come and go between recorded layers, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.family_checkpoints import FAMILIES, family_model
from kits.graph_recorder import record, recorded
from kits.session_messages import VOCAB
from kits.sharded_models import cut
from kits.stages import Book, Oracle, assert_rows, engines, random_tokens, through
from kits.tiny_models import tiny_model
from kits.torch_devices import needs_cuda

from flowspec_edge.messages import Open
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.preparation import RECORDED, choose_graphs, warm_up
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.util import kernels
from flowspec_edge.util.graphs import CudaRecorder

SPARSE = ("qwen3_moe", {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3,
                        "moe_intermediate_size": 64, "mlp_only_layers": [1]})


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize(("family", "extra"), [("llama", {}), SPARSE])
def test_the_same_bits_in_4_bits(tmp_path: Path, family: str, extra: dict[str, object], fuses: bool,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "fuses_rms_norm", lambda device: fuses)
    path = tiny_model(family, tmp_path / "model", layers=3, hidden=64, vocab=VOCAB, **extra)
    cut(path, tmp_path / "cut", 1, "int4")
    assert_the_same_bits(tmp_path / "cut", "bf16")


@pytest.mark.parametrize("family", [name for name in FAMILIES if "tied" not in name and "llama-l" not in name])
def test_the_same_bits_of_every_family(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "fuses_rms_norm", lambda device: False)
    assert_the_same_bits(family_model(family, tmp_path, vocab=VOCAB), "fp32")


def assert_the_same_bits(path: Path, dtype: str) -> None:
    """At any place in the text, with taps, with and without padding."""
    (one,), (other,) = (engines(path, 1, dtype, row_step=16, capacity=256) for _ in range(2))
    other.graphs |= recorded(other.model, 16, 32)
    books = Book(), Book()
    for rows in (5, 16, 1, 17, 32, 40):  # 40: not recorded
        text = random_tokens(rows, VOCAB, seed=rows)
        found = []
        for engine, book in zip((one, other), books, strict=True):
            segment = book.text(text)
            taps, output = through([engine], replace(segment, taps=(0, 1, 3)))
            found.append([output.hidden.array, *(tap.hidden.array for tap in taps)])
            chosen = [layer.experts.expert_ids for layer in engine.model.modules if layer.experts is not None]
            assert [of_rows is not None and len(of_rows) for of_rows in chosen] == [rows] * len(chosen)  # no padding's
        assert len(found[0]) == 4
        for mine, its in zip(*found, strict=True):
            np.testing.assert_array_equal(mine, its)


class Clock:
    """Seconds for one by one and for recorded passes, in turn, as ``choose_graphs`` asks for them."""

    def __init__(self, eager: float, faster: float) -> None:
        steps = [0.0, eager, eager, eager + faster]
        self._times = (turn * (eager + faster) + step for turn in count() for step in steps)

    def __call__(self) -> float:
        return next(self._times)


def prepared(model: Path, stage: int = 0, stages: int = 1, dtype: str = "fp32") -> StageEngine:
    engine = StageEngine(load_shard(model, stage, stages, dtype, row_step=16), 700)
    warm_up(engine)
    return engine


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_faster_and_the_same_is_kept(model: Path, stage: int) -> None:
    engine = prepared(model, stage, 3)
    choice = choose_graphs(engine, record, Clock(2.0, 1.0))
    assert (choice.ms, choice.reason) == (dict.fromkeys(RECORDED, (2000.0, 1000.0)), "")
    assert str(choice).startswith("CUDA graphs: 16 rows 1000.0 instead of 2000.0 ms, 32 rows ")
    assert sorted(engine.graphs) == [16, 32, 48, 64]
    assert (engine.sessions, engine.cache_rows, set(engine.counters.values())) == ((), 700, {0})


def test_what_is_slower_is_not(model: Path) -> None:
    engine = prepared(model)
    assert choose_graphs(engine, record, Clock(1.0, 1.5)).reason == (
        "layers of 64 rows run kernel by kernel: recorded layers take 1500.0 instead of 1000.0 ms")
    assert engine.graph_sizes == 0


def test_other_results_are_noticed(model: Path) -> None:
    """A recorded piece that stops writing leaves the results of an earlier pass."""
    def forgets(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        made, repeat = record(work)
        times = iter([*range(3), *[None] * 99])
        return made, lambda: repeat() if next(times, None) is not None else None

    engine = prepared(model)
    assert choose_graphs(engine, forgets, Clock(2.0, 1.0)).reason == (
        "layers of 64 rows run kernel by kernel: recorded layers compute other results")
    assert engine.graph_sizes == 0


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted when stream is capturing\nmore"),
                                   torch.OutOfMemoryError("CUDA out of memory.")])
def test_what_cannot_be_recorded_runs_as_before(model: Path, error: Exception) -> None:
    recorded_pieces = count()

    def fails(work: Callable[[], Any]) -> Any:
        if next(recorded_pieces) == 7:
            raise error
        return record(work)

    engine = prepared(model)
    assert choose_graphs(engine, fails, Clock(2.0, 1.0)).reason == (
        f"layers run kernel by kernel: they cannot be recorded: {str(error).splitlines()[0]}")
    assert (engine.graph_sizes, engine.sessions) == (0, ())
    oracle, book = Oracle(model), Book()
    engine.open(Open(1, 0, 64))
    assert_rows(through([engine], book.text(random_tokens(9, VOCAB, seed=1)))[1], book, oracle)


@needs_cuda
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_graphs_of_cuda(model: Path, dtype: str) -> None:
    shard = load_shard(model, 0, 1, dtype, "cuda")
    engine = StageEngine(shard, 700)
    warm_up(engine)
    choice = choose_graphs(engine, CudaRecorder(shard.device), Clock(2.0, 1.0))
    assert (sorted(engine.graphs), choice.reason) == ([16, 32, 48, 64], "")
