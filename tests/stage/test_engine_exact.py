"""Stages compute what transformers computes: plain texts, trees, chunks, families, dtypes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.stages import Book, Oracle, assert_cache, assert_rows, engines, random_tokens, through
from kits.tiny_models import tiny_llama

from flowspec_edge.messages import Cancel, Open, Segment
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_lm_head, load_shard
from flowspec_edge.util.tensors import to_torch

VOCAB = 97
TEXT = random_tokens(24, VOCAB, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=8, hidden=32, heads=4, kv_heads=2, vocab=VOCAB)


def grow(book: Book, tree: list[int], nodes: int, vocab: int, rng: np.random.Generator) -> list[int]:
    """Add ``nodes`` rows, each the child of a random one of ``tree`` or of those added before."""
    added: list[int] = []
    for _ in range(nodes):
        added.append(book.add(int(rng.integers(1, vocab)), int(rng.choice([*tree, *added]))))
    return added


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 11])
def test_text_equals_transformers(model: Path, oracle: Oracle, stages: int) -> None:
    _, output = through(engines(model, stages), Book().text(TEXT))
    expected = oracle.forward(TEXT)
    hidden = to_torch(output.hidden)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    head = load_lm_head(model, "fp32")
    logits = hidden @ head.T
    with torch.inference_mode():
        theirs = oracle.model(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("seed", range(4))
def test_trees_equal_their_paths(model: Path, oracle: Oracle, seed: int) -> None:
    """Random trees in segments of random length, from one token on, over several commits."""
    rng = np.random.default_rng(seed)
    book, chain = Book(), engines(model, 1 + seed)
    through(chain, book.text(TEXT))
    for _ in range(4):
        root = book.committed[-1]
        nodes: list[int] = []
        for size in rng.choice([0, 1, 1, 2, 5, 9], size=3).tolist():
            nodes += grow(book, [root, *nodes], size, VOCAB, rng)
            _, output = through(chain, book.builder.seal())
            assert len(output.numbers) == size
            assert_rows(output, book, oracle)
        children = [n for n in nodes if len(book.paths[n]) == len(book.paths[root]) + 1]
        if children:
            book.commit(children[-1])
        else:
            through(chain, book.text([7]))


def test_one_row_keeps_its_mask(model: Path, oracle: Oracle) -> None:
    """A lone row must not see the branches beside its own."""
    book, chain = Book(), engines(model, 2)
    through(chain, book.text(TEXT[:5]))
    root = book.committed[-1]
    left, right = book.add(3, root), book.add(4, root)
    through(chain, book.builder.seal())
    for parent in (left, right, left):
        book.add(11, parent)
        _, output = through(chain, book.builder.seal())
        assert_rows(output, book, oracle)


def test_a_committed_row_in_the_segment_that_commits_it(model: Path, oracle: Oracle) -> None:
    """Legal by the visibility rule: the base may lie above rows of the very segment."""
    book, chain = Book(), engines(model, 2)
    segment = book.text(TEXT[:6])
    early = replace(segment, base=6, committed=np.arange(6, dtype=np.int32), bits=np.zeros((6, 1), np.uint8))
    assert_rows(through(chain, early)[1], book, oracle)


def test_taps_come_from_the_stage_that_computed_them(model: Path, oracle: Oracle) -> None:
    book, chain = Book(), engines(model, 3)
    taps, _ = through(chain, replace(book.text(TEXT), taps=(0, 2, 5, 7)))
    assert [tap.layer for tap in taps] == [0, 2, 5, 7]
    for tap in taps:
        assert tap.numbers.tolist() == list(range(len(TEXT)))
        for number, row in zip(tap.numbers.tolist(), to_torch(tap.hidden), strict=True):
            expected = oracle.truth(book.paths[number]).layer_inputs[tap.layer]
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


def test_a_boundary_is_tapped_before_the_next_stage_begins(model: Path) -> None:
    book, chain = Book(), engines(model, 2)
    boundary = chain[0].model.layers[1]
    admitted = chain[0].admit(replace(book.text(TEXT), taps=(boundary,)))
    assert admitted is not None
    taps, passed_on, *_ = chain[0].compute([admitted])[0]
    assert [tap.layer for tap in taps] == [boundary]
    assert isinstance(passed_on, Segment)
    assert passed_on.hidden is not None
    np.testing.assert_array_equal(taps[0].hidden.array, passed_on.hidden.array)
    admitted = chain[1].admit(passed_on)
    assert admitted is not None
    assert chain[1].compute([admitted])[0][0] == []


def test_the_last_state_is_tapped_before_the_final_norm(model: Path, oracle: Oracle) -> None:
    book, chain = Book(), engines(model, 3)
    (tap,), output = through(chain, replace(book.text(TEXT), taps=(8,)))
    with torch.inference_mode():
        normed = oracle.model.model.norm(to_torch(tap.hidden))
    torch.testing.assert_close(normed, to_torch(output.hidden), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(normed, to_torch(tap.hidden), atol=1e-2)


def test_a_first_stage_without_layers_taps_the_embeddings(model: Path, oracle: Oracle) -> None:
    """A split of 0,8: no other stage makes them."""
    book, shard = Book(), load_shard(model, 0, 2, "fp32")
    engine = StageEngine(replace(shard, layers=(0, 0), modules=()))
    engine.open(Open(session=1, epoch=0, capacity=64))
    admitted = engine.admit(replace(book.text(TEXT), taps=(0, 4)))
    assert admitted is not None
    (tap,), *_ = engine.compute([admitted])[0]
    assert tap.layer == 0
    expected = oracle.model.get_input_embeddings()(torch.tensor(TEXT))
    torch.testing.assert_close(to_torch(tap.hidden), expected)


@pytest.mark.parametrize("polls", [0, 1, 3])
def test_cancel_at_any_layer(model: Path, oracle: Oracle, polls: int) -> None:
    """A cancelled run comes out empty, but its commits apply, and nothing of its rows is left."""
    book = Book()
    chain = engines(model, 2)
    through(chain, book.text(TEXT[:6]))
    root = book.committed[-1]
    child = book.add(5, root)
    through(chain, book.builder.seal())
    book.commit(child)
    book.add(6, child)
    doomed = book.builder.seal()
    calls = 0

    def poll() -> None:
        nonlocal calls
        calls += 1
        if calls == polls:
            chain[0].cancel(Cancel(1, 0, (doomed.run,)))

    if polls == 0:
        chain[0].cancel(Cancel(1, 0, (doomed.run,)))
    admitted = chain[0].admit(doomed)
    assert admitted is not None
    _, passed_on, *_ = chain[0].compute([admitted], poll)[0]
    assert calls == polls
    assert passed_on.numbers.size == 0
    assert chain[0].counters["cancelled"] == 1
    _, output = through(chain[1:], passed_on)
    assert output.numbers.size == 0
    book.add(8, child)
    assert_rows(through(chain, book.builder.seal())[1], book, oracle)
    for engine in chain:
        assert engine.cache_of(1) is not None
        assert engine.cache_of(1).numbers.tolist() == [0, 1, 2, 3, 4, 5, child, child + 2]
        assert_cache(engine, book, oracle)


def test_children_of_a_cancelled_run_are_orphans(model: Path) -> None:
    book, chain = Book(), engines(model, 1)
    through(chain, book.text(TEXT[:6]))
    engine: StageEngine = chain[0]
    parent = book.add(5, book.committed[-1])
    doomed = book.builder.seal()
    engine.cancel(Cancel(1, 0, (doomed.run,)))
    through(chain, doomed)
    book.add(6, parent)
    other = book.add(7, book.committed[-1])
    _, output = through(chain, book.builder.seal())
    assert output.numbers.tolist() == [other]
    assert engine.counters["orphan_rows"] == 1
