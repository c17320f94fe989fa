"""A stage on the strict device: launches, waits and memory of what it computes."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.family_checkpoints import family_model
from kits.graph_recorder import Recording, recorded
from kits.sharded_models import cut
from kits.stages import Book, admit, random_tokens, through
from kits.tiny_models import tiny_llama, tiny_model
from strictdevice import allocations, counting

from flowspec_edge.messages import Close, Open, Segment, pack_bits
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.preparation import warm_up
from flowspec_edge.stage.shard import Shard, load_shard
from flowspec_edge.util import kernels
from flowspec_edge.util.tensors import from_torch
from microbench.shapes.models import SHAPES, Shape, random_stage

pytestmark = pytest.mark.strict
VOCAB = 97


def narrow(name: str) -> Shape:
    """A published model's shape, eight times narrower: launches do not depend on the width."""
    shape = SHAPES[name]
    return Shape(shape.family, shape.hidden_size // 8, 2, shape.num_attention_heads // 8,
                 max(1, shape.num_key_value_heads // 8), shape.head_dim,
                 shape.intermediate_size // 512 * 64, 16)  # int4's blocks have 64 rows


def launches(name: str, dtype: str, layers: int) -> Counter[str]:
    return launches_of(random_stage(narrow(name), layers, dtype, "cuda"))


def launches_of(shard: Shard, graphs: bool = False) -> Counter[str]:
    """Of a slot with 16 rows behind 64, whose commit moves rows; without what ``graphs`` repeat."""
    torch.manual_seed(0)
    engine, hidden = StageEngine(shard), from_torch(torch.randn(16, shard.hidden_size).to(shard.dtype))
    if graphs:
        engine.graphs |= recorded(shard, 16)
        steps = engine.graphs[16]._steps
        steps[:] = [[step for step in between if isinstance(step, partial)] for between in steps]
    engine.open(Open(0, 0, 256))
    numbers = np.arange(256, dtype=np.int32)

    def segment(run: int) -> Segment:
        first = 64 + 16 * run
        committed = np.array([first - 16, first - 14, first - 1], np.int32) if run else numbers[:64]
        return Segment(session=0, epoch=0, run=run, first=first, stop=first + 16,
                       numbers=numbers[first:first + 16], base=first, positions=numbers[64:80],
                       bits=pack_bits([1 | 1 << i for i in range(16)], 16), hidden=hidden,
                       committed=committed)

    cache = engine.cache_of(0)
    assert cache is not None
    with torch.inference_mode():
        cache.fill(64)
        for rows in cache.rows():
            rows.normal_(0, 0.02)
    for run in range(3):
        admitted = admit(engine, segment(run))
        with counting(fused_rms=kernels.fuses_rms_norm(shard.device)) as log:
            [(_, result, *_)] = engine.compute([admitted])
        assert result.hidden is not None
        assert np.isfinite(result.hidden.array.astype(np.float32)).all()
        assert {event.name for event in log.waits} <= {"event"}, log.waits
        assert max(event.nbytes for event in log.of("download")) == result.hidden.array.nbytes
    return log.launches


@pytest.mark.parametrize(("name", "dtype", "fused", "composed"), [
    ("llama-2-7b", "fp16", 21, 23), ("llama-3.1-8b", "fp16", 21, 23), ("qwen3-8b", "fp16", 24, 26),
    ("llama-2-7b", "int4", 23, 27), ("qwen3-8b", "int4", 26, 30),
])
def test_launches_a_layer(name: str, dtype: str, fused: int, composed: int, monkeypatch: pytest.MonkeyPatch
                          ) -> None:
    for fuses, most in ((True, fused), (False, composed)):
        monkeypatch.setattr(kernels, "fuses_rms_norm", lambda device, fuses=fuses: fuses)
        one, two = (launches(name, dtype, layers) for layers in (1, 2))
        assert (two - one).total() == most, (fuses, two - one)


@pytest.mark.parametrize(("family", "fuses", "alone", "beside_graphs"), [
    ("qwen3_moe", True, 42, 25), ("qwen3_moe", False, 45, 25), ("mixtral", False, 42, 25)])
def test_launches_of_experts(tmp_path: Path, family: str, fuses: bool, alone: int, beside_graphs: int,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Two an expert, and a number that depends on neither rows nor experts; of a layer's graphs there are
    two."""
    monkeypatch.setattr(kernels, "fuses_rms_norm", lambda device: fuses)
    path = tiny_model(family, tmp_path / "model", layers=2, hidden=256, head_dim=64, intermediate_size=64,
                      num_local_experts=32, num_experts_per_tok=4, moe_intermediate_size=64,
                      norm_topk_prob=True, sliding_window=None)
    cut(path, tmp_path / "cut", 1, "int4")
    whole = load_shard(tmp_path / "cut", 0, 1, "bf16", "cuda")
    one, two = (replace(whole, index=1, stages=3, layers=(0, layers), modules=whole.modules[:layers],
                        embed=None, norm=None) for layers in (1, 2))
    for graphs, others in ((False, alone), (True, beside_graphs)):
        found = launches_of(two, graphs) - launches_of(one, graphs)
        experts = len(two.modules[1].experts.expert_ids.unique())
        assert found.total() - 2 * experts == others, found


@pytest.mark.parametrize(("family", "fuses", "recurrent", "attention"), [
    ("qwen3.5", True, 66, 44), ("qwen3.5", False, 69, 46), ("qwen3.5-moe", False, 89, 66)])
def test_launches_of_recurrent_layers(tmp_path: Path, family: str, fuses: bool, recurrent: int,
                                      attention: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without those of experts."""
    monkeypatch.setattr(kernels, "fuses_rms_norm", lambda device: fuses)
    path = family_model(family, tmp_path / "model", hidden=256)
    (path / "tokenizer.json").write_text("{}")
    cut(path, tmp_path / "cut", 1, "int4")
    whole = load_shard(tmp_path / "cut", 0, 1, "bf16", "cuda")
    parts = [replace(whole, index=1, stages=3, layers=(0, layers), modules=whole.modules[:layers],
                     embed=None, norm=None) for layers in (1, 2, 3)]
    counts = [launches_of(part) for part in parts]
    experts = [2 * len(layer.experts.expert_ids.unique()) if layer.experts else 0
               for layer in whole.modules[:3]]
    assert (counts[2] - counts[1]).total() - experts[2] == recurrent
    assert (counts[1] - counts[0]).total() - experts[1] == attention


def test_between_attention_nothing_is_uploaded_or_waited_for(model: Path) -> None:
    """What a CUDA graph demands: the same kernels on the same memory, wherever the rows are."""
    shard = load_shard(model, 0, 1, "fp16", "cuda")
    engine = StageEngine(shard, 700)
    [graphs] = recorded(shard, 16).values()
    engine.graphs[16] = graphs
    found, advance = [], graphs.advance

    def watched(layer: int) -> None:
        with counting() as log, Recording() as calls:
            advance(layer)
        assert {event.kind for event in log.events} <= {"launch"}
        found.append([(str(func), [tensor.data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)])
                      for func, args, _, _ in calls.calls if "clone" not in str(func)])

    graphs.advance = watched  # type: ignore[method-assign]
    texts = (3, 300)
    for text in texts:
        engine.open(Open(1, text, 600))
        book = Book(epoch=text)
        segment = book.text(random_tokens(text, VOCAB, seed=text))
        engine.graphs.clear()
        through([engine], segment)
        engine.graphs[16] = graphs
        through([engine], book.text(random_tokens(16, VOCAB, seed=9)))
    pieces = len(shard.modules) + 1
    assert len(found) == pieces * len(texts)
    names = [[name for name, _ in calls] for calls in found]
    assert names[:pieces] == names[pieces:]
    assert all(names)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=4, hidden=256, vocab=VOCAB)


def chat(engine: StageEngine, turns: int) -> None:
    """Sessions of several lengths that begin with rows of the one before, beside another that stays."""
    engine.open(Open(1, 0, 300))
    beside = Book(1)
    through([engine], beside.text(random_tokens(64, VOCAB, seed=1)))
    kept: tuple[int, ...] = ()
    for turn in range(2, 2 + turns):
        engine.open(Open(turn, 0, 300 + 50 * turn, concurrent=(1,), parent_session=turn - 1 if kept else -1,
                         rows=len(kept)))
        text = tuple(random_tokens(len(kept) + 60, VOCAB, seed=5))
        book = Book(turn, kept=text[:len(kept)])
        through([engine], book.text(list(text[len(kept):])))
        for _ in range(3):
            through([engine], book.text(random_tokens(16, VOCAB, seed=turn)))
            through([engine], beside.text(random_tokens(1, VOCAB, seed=turn)))
        kept = tuple(book.committed[:40 * (turn - 1)])
        engine.close(Close(turn, kept))
    engine.close(Close(1))


def test_after_the_start_memory_does_not_grow(model: Path) -> None:
    """Neither what is held between requests, nor what is held at most: the allocator has it all by then."""
    engine = StageEngine(load_shard(model, 0, 1, "fp16", "cuda"), 8000)
    gc.collect()  # what other tests have left
    with allocations() as start:
        warm_up(engine)
    with allocations() as made, counting() as log:
        chat(engine, 6)
    assert made.kept == 0
    assert 0 < made.peak <= start.peak, (made.peak, start.peak)
    assert not [event for event in log.waits if event.name != "event"], log.waits
    largest = max(made.events, key=lambda event: event.nbytes)
    assert largest.nbytes < engine.cache_bytes / 8, largest


def test_a_cache_that_grows_in_a_request_is_noticed(model: Path) -> None:
    """As without rows that are allocated at the start."""
    engine = StageEngine(load_shard(model, 0, 1, "fp16", "cuda"))
    warm_up(engine)
    with allocations() as made:
        chat(engine, 2)
    assert made.kept > 0
    assert [event.name for event in made.events if event.place == "stage/layers/kv_cache.py:_resize"]
