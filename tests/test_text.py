"""Tokens to text as they come, with a real byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_llama, tiny_tokenizer

from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import resolve_model
from flowspec_edge.text import TextStream, Tokenizer

TOKENIZER = tiny_tokenizer(260)  # a few merges only: most characters beyond ASCII take several tokens


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.data())
def test_pieces_of_any_size_join_to_the_text(text: str, data: st.DataObject) -> None:
    ids = TOKENIZER(text)["input_ids"]
    pieces: list[str] = []
    stream = TextStream(decode, pieces.append)
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        stream.push(ids[:count])
        ids = ids[count:]
    stream.close()
    assert "".join(pieces) == text


def test_a_split_character_waits_for_its_last_byte() -> None:
    pieces: list[str] = []
    stream = TextStream(decode, pieces.append)
    for token in TOKENIZER("a€b")["input_ids"]:
        stream.push([token])
    assert pieces == ["a", "€", "b"]


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    pieces: list[str] = []
    stream = TextStream(decode, pieces.append)
    stream.push(TOKENIZER("€")["input_ids"][:2])
    assert pieces == []
    stream.close()
    assert pieces == ["\ufffd"]


def test_encode_and_decode_are_the_targets(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "target", layers=1, hidden=32, vocab=300)
    tokenizer = Tokenizer(resolve_model(tmp_path))
    ids = tokenizer.encode("def f(x): return 'é'")
    assert tokenizer.decode([*ids, 0]) == "def f(x): return 'é'"  # 0 is special: it ends a text
    with pytest.raises(UsageError, match="the prompt is empty"):
        tokenizer.encode("")
    (tmp_path / "target" / "tokenizer.json").write_text("not json")
    with pytest.raises(UsageError, match=r"the tokenizer in .* cannot be loaded"):
        Tokenizer(resolve_model(tmp_path))
