"""Streams of tokens to text, with real tokenizers: byte-level, and pieces with byte fallback."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from kits.small_tokenizers import sentencepiece_style
from kits.tiny_models import tiny_llama, tiny_tokenizer

from flowspec_edge.errors import UsageError
from flowspec_edge.model.chat import Message
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.model.text import TextStream, Tokenizer

BROKEN = "\ufffd"


@cache
def backend(kind: str) -> Any:
    # Byte level with a few merges only: most characters beyond ASCII take several tokens.
    return tiny_tokenizer(260) if kind == "bytes" else sentencepiece_style()


@cache
def decoder(kind: str) -> Callable[[list[int]], str]:
    return lambda ids: str(backend(kind).decode(ids, skip_special_tokens=True))


KINDS = pytest.mark.parametrize("kind", ["bytes", "pieces"])
# Letters that are tokens, spaces, accents that combine, CJK within and without the vocabulary, emoji of
# several code points, and whatever else Unicode has.
TEXTS = st.text(st.one_of(st.sampled_from("the inaé中文 \n"),
                          st.sampled_from("e\u0301o\u0308ñ語한🙂👩\u200d🚀🇨🇭\ufe0f"),
                          st.characters(exclude_categories=["Cs"])), max_size=20)


def streamed(kind: str, ids: list[int], data: st.DataObject, after: list[int] | None = None) -> list[str]:
    pieces: list[str] = []
    stream = TextStream(decoder(kind), pieces.append, after or [])
    while ids:
        count = data.draw(st.integers(1, min(5, len(ids))))
        stream.push(ids[:count])
        ids = ids[count:]
    stream.close()
    return pieces


@KINDS
@given(TEXTS, st.data())
def test_pieces_of_any_size_join_to_the_text(kind: str, text: str, data: st.DataObject) -> None:
    ids = backend(kind)(text)["input_ids"]
    special = backend(kind).all_special_ids
    for place in data.draw(st.lists(st.integers(0, len(ids)), max_size=2)):
        ids.insert(place, data.draw(st.sampled_from(special)))
    whole = decoder(kind)(ids)
    pieces = streamed(kind, ids, data)
    if BROKEN not in whole:
        assert "".join(pieces) == whole
        assert all(pieces)
        assert not any(BROKEN in piece for piece in pieces)


@KINDS
@given(TEXTS, TEXTS, st.data())
def test_a_continuation_joins_to_its_prompt(kind: str, prompt: str, text: str, data: st.DataObject) -> None:
    """Also if the split is inside a word or a character."""
    ids = backend(kind)(prompt + text)["input_ids"]
    before = backend(kind)(prompt)["input_ids"]
    if ids[: len(before)] != before or BROKEN in prompt + text:
        return  # the cut is inside a token
    rest = "".join(streamed(kind, ids[len(before):], data, before))
    assert decoder(kind)(before) + rest == decoder(kind)(ids)


@KINDS
@given(st.data())
def test_any_tokens_make_text(kind: str, data: st.DataObject) -> None:
    """Arbitrary output of a model: bytes that are no characters, special tokens anywhere."""
    ids = data.draw(st.lists(st.integers(0, len(backend(kind)) - 1), max_size=12))
    whole, text = decoder(kind)(ids), "".join(streamed(kind, ids, data))
    assert text == "".join(streamed(kind, ids, data))  # however many come at a time
    if BROKEN not in whole or kind == "bytes":
        assert text == whole
    else:
        assert BROKEN in text


@KINDS
def test_a_split_character_waits_for_its_last_byte(kind: str) -> None:
    pieces: list[str] = []
    stream = TextStream(decoder(kind), pieces.append)
    for token in backend(kind)("a€b")["input_ids"]:
        stream.push([token])
    assert pieces == ["a", "€", "b"]


def test_a_broken_byte_leaves_written_characters_alone() -> None:
    """A decoder with byte fallback rejects a whole run of bytes; the text written before stays."""
    euro, e2, a = [3 + 0xE2, 3 + 0x82, 3 + 0xAC], 3 + 0xE2, backend("pieces")("a")["input_ids"][-1]
    pieces: list[str] = []
    stream = TextStream(decoder("pieces"), pieces.append)
    for token in [*euro, e2, a]:
        stream.push([token])
    stream.close()
    assert pieces == ["€", f"{BROKEN} a"]


@KINDS
@pytest.mark.parametrize("text", ["broken", "halves", "spaces", "special", "words"])
def test_the_work_for_a_token_does_not_grow(kind: str, text: str) -> None:
    """It is counted in ids that are decoded; the text is that of any number of them."""
    tokenizer = backend(kind)
    euro = tokenizer("€")["input_ids"][-3:]
    ids = {"broken": [euro[1]], "halves": euro[:2], "spaces": tokenizer("a    ")["input_ids"][-2:],
           "special": [*tokenizer("a")["input_ids"][-1:], *[tokenizer.eos_token_id] * 50],
           "words": tokenizer("the in")["input_ids"][-4:]}[text]
    decoded, pieces = [0], list[str]()

    def decode(some: Sequence[int]) -> str:
        decoded[0] += len(some)
        return decoder(kind)(list(some))

    stream = TextStream(decode, pieces.append)
    waited = 0
    for token in ids * (800 // len(ids)):
        before, sent = decoded[0], len(pieces)
        stream.push([token])
        assert decoded[0] - before <= 200
        waited = 0 if len(pieces) > sent else waited + 1
        assert waited <= (50 if text == "special" else 3)
    stream.close()
    assert "".join(pieces) == decoder(kind)(ids * (800 // len(ids)))


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


def test_a_token_that_the_model_lacks_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "target", layers=1, hidden=32, vocab=300)
    longer = tiny_tokenizer(300)
    longer.add_special_tokens({"additional_special_tokens": ["<added>"]})
    longer.save_pretrained(tmp_path / "target")
    tokenizer = Tokenizer(resolve_model(tmp_path), "bare")
    unknown = r"the text has '<added>', token 300 of the tokenizer, but the model's vocabulary has 300 tokens"
    for ask in (tokenizer.encode, lambda text: tokenizer.chat([Message("user", text)])):
        assert ask("a <adde>")
        with pytest.raises(UsageError, match=unknown):
            ask("a <added>")


def test_ids_beyond_the_tokenizer_have_no_text(tmp_path: Path) -> None:
    """An output matrix that is padded may give them."""
    tiny_llama(tmp_path / "target", layers=1, hidden=32, vocab=400)
    tiny_tokenizer(300).save_pretrained(tmp_path / "target")
    tokenizer = Tokenizer(resolve_model(tmp_path))
    ids = tokenizer.encode("né")
    pieces: list[str] = []
    stream = TextStream(tokenizer.decode, pieces.append)
    stream.push([399, *ids[:2], 350, *ids[2:], 301])
    stream.close()
    assert tokenizer.decode([399, 350]) == ""
    assert "".join(pieces) == tokenizer.decode([399, *ids[:2], 350, *ids[2:], 301])


def test_a_continuation_keeps_its_first_space(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "target", layers=1, hidden=32, vocab=400)
    sentencepiece_style().save_pretrained(tmp_path / "target")
    tokenizer = Tokenizer(resolve_model(tmp_path))
    the, a = tokenizer.encode("in the"), tokenizer.encode("a")[1:]
    assert tokenizer.decode([*the, *a]) == "in the a"
    for after, expected in ((the, [" a"]), ([], ["a"])):
        pieces: list[str] = []
        TextStream(tokenizer.decode, pieces.append, after).push(a)
        assert pieces == expected


def test_a_tokenizer_as_sentencepiece_model_only(tmp_path: Path) -> None:
    """Llama-2's and Vicuna's checkpoints have no tokenizer.json: sentencepiece itself is the oracle."""
    target = tiny_llama(tmp_path / "target", layers=1, hidden=32, vocab=400)
    for file in target.glob("tokenizer*"):
        file.unlink()
    sentencepiece.SentencePieceTrainer.train(  # as Llama's was made
        sentence_iterator=iter(Path(__file__).read_text(encoding="utf-8").splitlines()),
        model_prefix=str(target / "tokenizer"), model_type="bpe", vocab_size=400, byte_fallback=True,
        character_coverage=1.0, minloglevel=2)
    (target / "tokenizer.vocab").unlink()
    (target / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
         "add_bos_token": True}))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(target / "tokenizer.model"))
    tokenizer = Tokenizer(resolve_model(tmp_path))
    for text in ("def test(path): return 1", "Ünïcödé 😀 text"):
        ids = tokenizer.encode(text)
        assert ids == [theirs.bos_id(), *theirs.encode(text)]
        assert tokenizer.decode(ids) == text
