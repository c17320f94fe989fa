"""Layers with a window: their memory does not grow with the text, and is what the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.family_checkpoints import VOCAB, family_model
from kits.sharded_models import cut
from kits.stages import Book, Oracle, assert_cache, assert_rows, random_tokens, through

from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Close, Open
from flowspec_edge.model.manifest import SESSIONS, WINDOW_SLACK, stage_part
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.layers.kinds import KeysValues
from flowspec_edge.stage.shard import load_shard

WINDOW, LAYERS, REQUESTS, CHUNK, TEXT = 7, 4, 1, 32, 400
LONG = 240  # rows, more than a window's layers hold and a segment
HELD = 2 * (WINDOW - 1) + 2 * WINDOW_SLACK  # of the text, at most
ROWS = TEXT + CHUNK
ROW = 2 * 2 * 16 * 4  # bytes in a layer: key and value, kv heads, head_dim, fp32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = family_model("gpt-oss", tmp_path_factory.mktemp("windows") / "target", layers=LAYERS)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_memory_is_what_the_plan_says(model: Path, tmp_path: Path) -> None:
    manifest = cut(model, tmp_path / "cut", 1, "fp32")
    engine = StageEngine(load_shard(tmp_path / "cut", 0, 1, "fp32"), ROWS, REQUESTS, CHUNK)
    windows = REQUESTS * (SESSIONS * HELD + CHUNK)
    assert engine.cache_bytes == 2 * ROW * ROWS + 2 * ROW * windows
    assert manifest.part(stage_part(0)).cache_bytes(ROWS, REQUESTS, CHUNK) == engine.cache_bytes
    assert LAYERS * model_bytes(str(model), "fp32").layer_cache(ROWS, REQUESTS, CHUNK) == engine.cache_bytes
    assert manifest.part(stage_part(0)).cache_bytes(ROWS) == LAYERS * ROW * ROWS


@pytest.mark.parametrize(("snapshot", "rows"), [(0, LONG - WINDOW_SLACK), (120, 120),
                                                (120, LONG - WINDOW_SLACK), (3, 3)])
def test_a_long_text_stays_within_it(model: Path, oracle: Oracle, snapshot: int, rows: int) -> None:
    """A text, its retained prefix and the session that goes on from it, against transformers."""
    tokens = random_tokens(LONG, VOCAB, seed=6)
    engine = StageEngine(load_shard(model, 0, 1, "fp32"), ROWS, REQUESTS, CHUNK)
    reserved, book = engine.cache_bytes, Book()
    engine.open(Open(1, 0, ROWS, tentative=CHUNK, snapshot=snapshot))
    for lo in range(0, LONG, CHUNK):
        output = through([engine], book.text(tokens[lo : lo + CHUNK]))[1]
        cache = engine.cache_of(1)
        assert cache is not None
        assert len(cache) == min(lo + CHUNK, LONG)
        for part, kind in zip(cache.parts, engine.model.layers_of_kinds, strict=True):
            assert isinstance(kind, KeysValues)
            assert len(part) <= (HELD + CHUNK if kind.window else LONG)
    assert_rows(output, book, oracle)
    engine.close(Close(1, tuple(range(LONG))))
    assert_goes_on(engine, oracle, tokens, rows)
    assert engine.cache_bytes == reserved


def assert_goes_on(engine: StageEngine, oracle: Oracle, tokens: list[int], rows: int) -> None:
    """A session that begins with ``rows`` rows of what session 1 left."""
    engine.open(Open(2, 0, ROWS, tentative=CHUNK, parent_session=1, rows=rows))
    book = Book(2, kept=tuple(tokens[:rows]))
    root = book.committed[-1]
    first, second = book.add(3, root), book.add(4, root)
    book.add(5, first)
    book.add(6, second)
    assert_rows(through([engine], book.builder.seal())[1], book, oracle)
    assert_cache(engine, book, oracle)


def test_a_text_that_is_cut_too_short_is_refused(model: Path) -> None:
    engine = StageEngine(load_shard(model, 0, 1, "fp32"))
    engine.open(Open(1, 0, ROWS, tentative=CHUNK, snapshot=99))
    book = Book()
    for lo in range(0, 320, CHUNK):
        through([engine], book.text(random_tokens(CHUNK, VOCAB, seed=lo)))
    engine.close(Close(1, tuple(range(320))))
    with pytest.raises(ProtocolError, match="begin with 100 rows of a text of which layers with a window"):
        engine.open(Open(2, 0, ROWS, tentative=CHUNK, parent_session=1, rows=100))
    assert engine.retained == {}


def test_a_snapshot_of_what_is_gone_is_refused(model: Path) -> None:
    engine, book = StageEngine(load_shard(model, 0, 1, "fp32")), Book()
    engine.open(Open(1, 0, ROWS, tentative=CHUNK))
    through([engine], book.text(random_tokens(40, VOCAB, seed=1)))
    engine.close(Close(1, tuple(range(40))))
    with pytest.raises(ProtocolError, match="snapshot after 29 rows comes too late for a text of 30"):
        engine.open(Open(2, 0, ROWS, tentative=CHUNK, parent_session=1, rows=30, snapshot=29))
    assert engine.retained == {}
    assert engine.sessions == ()
