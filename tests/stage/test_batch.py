"""Segments of several sessions in one pass: every row is what transformers computes for its own text."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.stages import Book, Oracle, admit, assert_cache, assert_rows, engines, random_tokens

from flowspec_edge.messages import Cancel, Close, Open, Output, Prune, Segment
from flowspec_edge.stage.engine import StageEngine

I32 = np.int32


def opened(model: Path, stages: int, sessions: int, row_step: int = 1) -> list[StageEngine]:
    chain = engines(model, stages, capacity=64, row_step=row_step)
    for engine in chain:
        for session in range(2, sessions + 1):
            engine.open(Open(session, 0, 64, concurrent=tuple(range(1, session))))
    return chain


def together(chain: list[StageEngine], segments: list[Segment]) -> list[Output]:
    """Pass a batch down the chain; the outputs of its segments."""
    messages: list[Segment | Output] = list(segments)
    for engine in chain:
        admitted = []
        for message in messages:
            assert isinstance(message, Segment)
            admitted.append(admit(engine, message))
        messages = [result.message for result in engine.compute(admitted)]
    return [message for message in messages if isinstance(message, Output)]


def grow(book: Book, choice: st.DataObject) -> Segment:
    """A segment with any rows below the text or below living rows, perhaps after a commit; perhaps none."""
    text = book.paths[book.committed[-1]]
    following = sorted(number for number in book.live() if book.paths[number][:-1] == text)
    if following and choice.draw(st.booleans()):
        book.commit(choice.draw(st.sampled_from(following)))
    for _ in range(choice.draw(st.integers(0, 4))):
        parent = choice.draw(st.sampled_from([book.committed[-1], *sorted(book.live())]))
        token = choice.draw(st.integers(1, 90))
        if (*book.paths[parent], token) not in book.paths.values():  # a node's children differ
            book.add(token, parent)
    return book.builder.seal()


@settings(max_examples=8, deadline=None)
@given(sessions=st.integers(1, 5), stages=st.integers(1, 3), row_step=st.sampled_from([1, 16]), choice=st.data())
def test_rows_of_several_texts(model: Path, oracle: Oracle, sessions: int, stages: int, row_step: int,
                               choice: st.DataObject) -> None:
    """Texts of different lengths, any of them in a batch, prunes in between."""
    chain = opened(model, stages, sessions, row_step)
    books = [Book(session) for session in range(1, sessions + 1)]
    for i, book in enumerate(books):
        outputs = together(chain, [book.text(random_tokens(3 + 5 * i, 97, seed=i))])
        book.builder.skip_prune()
        assert_rows(outputs[0], book, oracle)
    for _ in range(3):
        batch = choice.draw(st.lists(st.sampled_from(books), min_size=1, unique=True))
        outputs = together(chain, [grow(book, choice) for book in batch])
        for book, output in zip(batch, outputs, strict=True):
            assert output.session == book.builder.session
            assert_rows(output, book, oracle)
        pruned = choice.draw(st.sampled_from(books))
        hint = pruned.prune()
        for engine in chain:
            engine.prune(hint)
    for engine in chain:
        for book in books:
            assert_cache(engine, book, oracle)


def started(model: Path, sessions: int) -> tuple[StageEngine, list[Book]]:
    """A whole model with a text of each session."""
    [engine] = opened(model, 1, sessions)
    books = [Book(session) for session in range(1, sessions + 1)]
    together([engine], [book.text(random_tokens(6, 97, seed=i)) for i, book in enumerate(books)])
    return engine, books


ENDINGS = ("none", "close", "cancel", "reopen", "replace")


@examples(400, quick=36)
@given(row_step=st.sampled_from([1, 16]), data=st.data())
def test_sessions_end_between_layers(model: Path, oracle: Oracle, row_step: int, data: st.DataObject) -> None:
    """Any of three parts may have no rows left, and any session may end before any layer: its rows come out
    empty, its memory may belong to another session at once, and the others' rows and caches stay exact."""
    [engine] = opened(model, 1, 3, row_step)
    books = {session: Book(session) for session in (1, 2, 3)}
    together([engine], [book.text(random_tokens(6, 97, seed=i)) for i, book in books.items()])
    rows = {session: data.draw(st.integers(0, 2), f"rows of {session}") for session in books}
    doomed = data.draw(st.sets(st.sampled_from([1, 2, 3])), "pruned before the first layer")
    ends = {session: data.draw(st.sampled_from(ENDINGS), f"end of {session}") for session in books}
    layers = {session: data.draw(st.integers(0, 3), f"layer of {session}") for session in books}
    batch = []
    for session, book in books.items():
        book.builder.skip_prune()
        for token in range(rows[session]):
            book.add(5 + token, book.committed[-1])
        batch.append(book.builder.seal())
    admitted = [engine.admit(segment) for segment in batch]
    for segment in batch:
        if segment.session in doomed:
            rows[segment.session] = 0
            engine.prune(Prune(segment.session, 0, 0, segment.first, segment.stop, np.empty(0, I32)))

    def beside() -> dict[str, Any]:
        return {"capacity": 64, "concurrent": engine.sessions, "retained": tuple(engine.retained)}

    pending = [session for session, end in ends.items() if end != "none"]

    def strike(layer: int) -> None:
        for session in [session for session in pending if layers[session] == layer]:
            pending.remove(session)
            match ends[session]:
                case "close":
                    engine.close(Close(session, tuple(range(4))))  # the cache shrinks to these rows
                case "cancel":
                    engine.cancel(Cancel(session, 0, (1,)))
                case "reopen":
                    engine.open(Open(session, 1, **beside()))
                case "replace":
                    engine.close(Close(session))
                    engine.open(Open(session + 10, 0, **beside()))

    polls = count()
    results = engine.compute([segment for segment in admitted if segment], lambda: strike(next(polls)))
    ended = {session for session, end in ends.items() if end != "none" and session not in pending}
    for session, (_, output, *_) in zip(books, results, strict=True):
        assert isinstance(output, Output)
        assert (output.session, output.epoch) == (session, 0)
        assert len(output.numbers) == (0 if session in ended else rows[session])
        assert_rows(output, books[session], oracle)
        if session not in ended:
            assert_cache(engine, books[session], oracle)
        if ends[session] == "cancel":
            counted = engine.counters_of(session)["cancelled"]
            assert counted == (session in ended and rows[session] > 0)
    for layer in range(4):  # those that the pass did not reach
        strike(layer)
    for session, book in books.items():
        heir = book
        match ends[session]:
            case "close":
                engine.open(Open(session + 10, 0, **beside(), parent_session=session, rows=4))
                heir = Book(session + 10, kept=book.paths[3])
            case "reopen":
                heir = Book(session, 1)
            case "replace":
                heir = Book(session + 10)
        assert_rows(together([engine], [heir.text([7, 8, 9])])[0], heir, oracle)
        assert_cache(engine, heir, oracle)


def test_when_all_end_the_pass_is_broken_off(model: Path) -> None:
    engine, books = started(model, 2)
    batch = []
    for book in books:
        book.add(5, book.committed[-1])
        batch.append(engine.admit(book.builder.seal()))
    polls = []

    def cancel() -> None:
        polls.append(1)
        for session in (1, 2):
            engine.cancel(Cancel(session, 0, (1,)))

    results = engine.compute([segment for segment in batch if segment], poll=cancel)
    assert len(polls) == 1  # of four layers
    assert [(len(result.message.numbers), result.rows, result.cancelled) for result in results] == [
        (0, 0, True)] * 2
    assert engine.counters["cancelled"] == 2


def test_taps_of_those_that_asked(model: Path, oracle: Oracle) -> None:
    engine, books = started(model, 3)
    batch = []
    for layers, book in zip([(1, 2), (), (2,)], books, strict=True):
        book.add(9, book.committed[-1])
        batch.append(admit(engine, replace(book.builder.seal(), taps=layers)))
    results = engine.compute(batch)
    assert [[tap.layer for tap in result.taps] for result in results] == [[1, 2], [], [2]]
    for (taps, *_), book in zip(results, books, strict=True):
        for tap in taps:
            truth = oracle.truth(book.paths[int(tap.numbers[0])]).layer_inputs[tap.layer]
            np.testing.assert_allclose(tap.hidden.array[0], truth.numpy(), atol=1e-4)
