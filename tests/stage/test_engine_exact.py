"""Stages compute what transformers computes of a text, and tap what they are asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.stages import Book, Oracle, admit, assert_rows, engines, random_tokens, through
from kits.tiny_models import tiny_llama

from flowspec_edge.messages import Cancel, Open
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_lm_head, load_shard
from flowspec_edge.util.tensors import to_torch

VOCAB = 97
TEXT = random_tokens(24, VOCAB, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=8, hidden=32, heads=4, kv_heads=2, vocab=VOCAB)


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


def test_a_committed_row_in_the_segment_that_commits_it(model: Path, oracle: Oracle) -> None:
    """Legal by the visibility rule: the base may lie above rows of the very segment."""
    book, chain = Book(), engines(model, 2)
    segment = book.text(TEXT[:6])
    early = replace(segment, base=6, committed=np.arange(6, dtype=np.int32), bits=np.zeros((6, 1), np.uint8))
    assert_rows(through(chain, early)[1], book, oracle)


def test_taps_come_from_the_stage_that_computed_them(model: Path, oracle: Oracle) -> None:
    """At a boundary, as 3 and 6 are, from one of both."""
    book, chain = Book(), engines(model, 3)
    taps, _ = through(chain, replace(book.text(TEXT), taps=(0, 3, 5, 6)))
    assert [tap.layer for tap in taps] == [0, 3, 5, 6]
    for tap in taps:
        assert tap.numbers.tolist() == list(range(len(TEXT)))
        for number, row in zip(tap.numbers.tolist(), to_torch(tap.hidden), strict=True):
            expected = oracle.truth(book.paths[number]).layer_inputs[tap.layer]
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


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
    (tap,), *_ = engine.compute([admit(engine, replace(book.text(TEXT), taps=(0, 4)))])[0]
    assert tap.layer == 0
    expected = oracle.model.get_input_embeddings()(torch.tensor(TEXT))
    torch.testing.assert_close(to_torch(tap.hidden), expected)


def test_children_of_a_cancelled_run_are_orphans(model: Path) -> None:
    book, chain = Book(), engines(model, 1)
    through(chain, book.text(TEXT[:6]))
    engine: StageEngine = chain[0]
    parent = book.add(5, book.committed[-1])
    doomed = book.builder.seal()
    engine.cancel(Cancel(1, 0, (doomed.run,)))
    through(chain, doomed)
    assert engine.cache_of(1).committed == 6  # what it commits applies
    book.add(6, parent)
    other = book.add(7, book.committed[-1])
    _, output = through(chain, book.builder.seal())
    assert output.numbers.tolist() == [other]
    assert engine.counters["orphan_rows"] == 1
