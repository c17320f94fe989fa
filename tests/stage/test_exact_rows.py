"""In 16 bits a row's bits depend on its path alone: not on the rows beside it, on prunes, or on when it is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.family_checkpoints import FAMILIES, VOCAB, family_model
from kits.sharded_models import cut
from kits.stages import Book, admit, engines, random_tokens, through
from kits.tiny_models import tiny_llama, tiny_model

from flowspec_edge.messages import Close, Open, Output, Segment
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.quant.grouped import CpuLinear
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.util.tensors import to_torch

CAPACITY = 600
Rows = dict[tuple[int, ...], torch.Tensor]  # by path: what the last stage gives for its end


def take(rows: Rows, book: Book, output: Output) -> None:
    for number, hidden in zip(output.numbers.tolist(), to_torch(output.hidden), strict=True):
        rows[book.paths[number]] = hidden.clone()


def grown(chain: list[StageEngine], text: list[int], seed: int, rounds: int = 8) -> Rows:
    """Rows of a text in uneven chunks, then of trees in segments, of which a path is committed and the rest pruned,
    early, late or never."""
    rng, book, rows = np.random.default_rng(seed), Book(), Rows()
    while text:
        size = int(rng.integers(1, 24))
        take(rows, book, through(chain, book.text(text[:size]))[1])
        text = text[size:]
    for _ in range(rounds):
        root = book.committed[-1]
        tree = [root]
        for size in rng.choice([1, 1, 2, 5, 9, 16], size=3).tolist():
            for _ in range(size):
                parent = tree[-1] if rng.random() < 0.6 else int(rng.choice(tree))  # so that paths grow long
                tree.append(book.add(int(rng.integers(1, VOCAB)), parent))
            take(rows, book, through(chain, book.builder.seal())[1])
        longest = max((book.paths[number] for number in tree), key=len)
        for length in range(len(book.paths[root]) + 1, int(rng.integers(len(book.paths[root]), len(longest))) + 2):
            book.commit(next(number for number in tree if book.paths[number] == longest[:length]))
        if rng.random() < 0.7:
            prune = book.prune()
            for engine in chain:
                engine.prune(prune)
    return rows


def plain(chain: list[StageEngine], session: int, path: tuple[int, ...], kept: int = 0) -> Rows:
    """The rows of one text, a row a pass; the session begins with ``kept`` of them."""
    book, rows = Book(session, kept=path[:kept]), Rows()
    for token in path[kept:]:
        take(rows, book, through(chain, book.text([token]))[1])
    return rows


def assert_same_bits(chain: list[StageEngine], text: int = 70, seed: int = 0) -> None:
    tokens = random_tokens(text, VOCAB, seed)
    rows = grown(chain, tokens, seed)
    paths = sorted(rows, key=len)
    compared = 0
    for session, path in enumerate((paths[-1], paths[(text + len(paths)) // 2]), 2):
        for engine in chain:
            engine.open(Open(session, 0, CAPACITY))
        for start, hidden in plain(chain, session, path).items():
            assert torch.equal(hidden, rows[start]), f"a row at {len(start)} of {len(path)} differs"
            compared += 1
    assert compared > 2 * text


@pytest.mark.parametrize("family", ["llama-biases", "llama-mqa", "mistral-window", "qwen3", "qwen3-moe", "mixtral",
                                    "gpt-oss", "phi3", "gemma3", "qwen3.5", "qwen3.5-moe"])
def test_every_form_of_attention_and_of_experts(tmp_path: Path, family: str) -> None:
    assert_same_bits(engines(family_model(family, tmp_path), 2, "bf16", CAPACITY))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str, dtype: str) -> None:
    assert_same_bits(engines(family_model(family, tmp_path), 2, dtype, CAPACITY), seed=3)


@pytest.mark.parametrize("row_step", [1, 16])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (4, 4)])
def test_types_heads_and_steps(tmp_path: Path, heads: tuple[int, int], dtype: str, row_step: int) -> None:
    model = tiny_llama(tmp_path, layers=2, hidden=48, heads=heads[0], kv_heads=heads[1], vocab=VOCAB)
    assert_same_bits(engines(model, 1, dtype, CAPACITY, row_step=row_step), seed=1)


def test_windows_that_are_longer_than_a_rows_own_columns(tmp_path: Path) -> None:
    model = tiny_model("mistral", tmp_path, layers=2, hidden=32, vocab=VOCAB, sliding_window=75)
    assert_same_bits(engines(model, 1, "bf16", CAPACITY), text=160)


def test_caches_in_8_bits(tmp_path: Path) -> None:
    shard = load_shard(tiny_llama(tmp_path, layers=2, hidden=48, vocab=VOCAB), 0, 1, "bf16")
    engine = StageEngine(replace(shard, kv_cache="int8"))
    engine.open(Open(1, 0, CAPACITY))
    assert_same_bits([engine])


@pytest.mark.parametrize("window", [None, 75])
def test_a_session_that_goes_on_from_another_ones_text(tmp_path: Path, window: int | None) -> None:
    model = tiny_model("mistral", tmp_path, layers=2, hidden=32, vocab=VOCAB, sliding_window=window)
    chain, text = engines(model, 2, "bf16", CAPACITY), tuple(random_tokens(190, VOCAB, seed=5))
    whole = plain(chain, 1, text)
    for engine in chain:
        engine.close(Close(1, tuple(range(len(text)))))
        engine.open(Open(2, 0, CAPACITY, parent_session=1, rows=150))
    for path, hidden in plain(chain, 2, text, kept=150).items():
        assert torch.equal(hidden, whole[path])


def test_a_batch_of_requests(tmp_path: Path) -> None:
    """A row of plain decoding in one pass with another request's tree."""
    engine = engines(tiny_llama(tmp_path, layers=2, hidden=48, vocab=VOCAB), 1, "bf16", CAPACITY)[0]
    alone = engines(tmp_path, 1, "bf16", CAPACITY)[0]
    engine.open(Open(2, 0, CAPACITY, concurrent=(1,)))
    text, other = random_tokens(60, VOCAB, seed=7), Book(2)
    expected = plain([alone], 1, tuple(text))
    book, rng = Book(), np.random.default_rng(0)
    through([engine], other.text(random_tokens(45, VOCAB, seed=8)))
    for token in text:
        for _ in range(int(rng.integers(1, 9))):
            other.add(int(rng.integers(1, VOCAB)), int(rng.choice([other.committed[-1], *other.live()])))
        segments: list[Segment] = []
        for segment in (other.builder.seal(), book.text([token])):
            segments.append(admit(engine, segment))
        messages = [result.message for result in engine.compute(segments)]
        assert isinstance(messages[1], Output)
        hidden = to_torch(messages[1].hidden)[0]
        assert torch.equal(hidden, expected[book.paths[int(messages[1].numbers[0])]])


def test_int4_beside_a_long_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is alone in a pass multiplies expanded weights where that is faster; another request's row never
    does.  Here expanded weights are marked, by twice the product."""
    monkeypatch.setattr(CpuLinear, "expands_from", 256)
    monkeypatch.setattr(CpuLinear, "expanded_product", lambda linear, x: 2 * linear.product(x))
    path = tiny_llama(tmp_path / "model", layers=2, hidden=128, vocab=VOCAB)
    (path / "tokenizer.json").write_text("{}")
    cut(path, tmp_path / "cut", 1, "int4")
    engine = StageEngine(load_shard(tmp_path / "cut", 0, 1, "bf16"))
    texts = [random_tokens(40, VOCAB, seed=1), random_tokens(300, VOCAB, seed=2)]
    for session in (1, 2):
        engine.open(Open(session, 0, CAPACITY, tentative=400, concurrent=(3 - session,)))
    expected = plain([engine], 1, tuple(texts[0]))
    kernel = plain([engine], 2, tuple(texts[1]))
    for session in (3, 4, 5):
        engine.open(Open(session, 0, CAPACITY, tentative=400, concurrent=tuple({1, 2, 3, 4, 5} - {session})))
    alone, book, other = Book(3), Book(4), Book(5)
    through([engine], book.text(texts[0][:-1]))
    hidden = to_torch(through([engine], alone.text(texts[1]))[1].hidden)[-1]
    assert not torch.equal(hidden, kernel[tuple(texts[1])])
    segments: list[Segment] = []
    for segment in (book.text(texts[0][-1:]), other.text(texts[1])):
        segments.append(admit(engine, segment))
    for result, known, text in zip(engine.compute(segments), (expected, kernel), texts, strict=True):
        assert isinstance(result.message, Output)
        assert torch.equal(to_torch(result.message.hidden)[-1], known[tuple(text)])
