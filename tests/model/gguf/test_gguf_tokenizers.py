"""Tokenizers out of GGUF files, against SentencePiece and transformers' own classes."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.gguf.config import Fields
from flowspec_edge.model.gguf.tokenizer import tokenizer_of

TEXT = Path(__file__).read_text() + " Straße, naïve café — 東京 2026; don't, I'LL 1234567 +-*/ \t\n\n x" * 20
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def tokenizer(**fields: Any) -> Tokenizer:
    return tokenizer_of(Fields(Path("m.gguf"), {
        "general.architecture": "llama", **{f"tokenizer.ggml.{key}": value for key, value in fields.items()}}))


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    """Tokens and merges of a byte-level BPE whose last token ends a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    state = json.loads(made.to_str())["model"]
    tokens = [*sorted(state["vocab"], key=state["vocab"].get), "<|endoftext|>"]
    return {"model": "gpt2", "tokens": tokens, "merges": [" ".join(merge) for merge in state["merges"]],
            "token_type": np.array([NORMAL] * (len(tokens) - 1) + [CONTROL]), "eos_token_id": len(tokens) - 1}


@pytest.mark.parametrize(("pre", "theirs"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_byte_level_tokenizers_are_transformers(byte_level: dict[str, Any], pre: str, theirs: Any) -> None:
    vocabulary = {token: number for number, token in enumerate(byte_level["tokens"])}
    other = theirs(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in byte_level["merges"]],
                   unk_token="<|endoftext|>", eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    ours = tokenizer(**byte_level, pre=pre)

    pieces = [TEXT[at : at + 60] for at in range(0, len(TEXT), 60)]

    @given((st.text() | st.sampled_from(pieces)).filter(lambda text: "<|" not in text))
    @examples(300, quick=36)
    def same(text: str) -> None:
        found = ours.encode(f"{text}<|endoftext|>{text}").ids
        assert found == other(f"{text}<|endoftext|>{text}").input_ids
        assert ours.decode(ours.encode(text).ids) == (text if pre == "gpt-2" else unicodedata.normalize(
            "NFC", text))

    same()


def test_digits_stand_alone_where_the_model_says_so(byte_level: dict[str, Any]) -> None:
    merged = {**byte_level, "merges": ["7 8", "78 7"], "tokens": [*byte_level["tokens"], "78", "787"]}
    assert tokenizer(**merged, pre="default").encode("7878").tokens == ["78", "78"]
    assert tokenizer(**merged, pre="smollm").encode("7878").tokens == ["7", "8", "7", "8"]
    assert tokenizer(**merged, pre="llama-bpe").encode("7878").tokens == ["787", "8"]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    home = tmp_path_factory.mktemp("sentencepiece")
    (home / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(home / "text"), model_prefix=str(home / "m"), model_type="bpe", vocab_size=520, byte_fallback=True,
        character_coverage=1.0, minloglevel=2, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True)
    return sentencepiece.SentencePieceProcessor(model_file=str(home / "m.model"))


def test_sentencepiece_is_sentencepiece(sentences: sentencepiece.SentencePieceProcessor) -> None:
    count = sentences.get_piece_size()
    types = [UNKNOWN if sentences.is_unknown(i) else CONTROL if sentences.is_control(i)
             else BYTE if sentences.is_byte(i) else NORMAL for i in range(count)]
    ours = tokenizer(model="llama", tokens=[sentences.id_to_piece(i) for i in range(count)], token_type=np.array(types),
                     scores=np.array([sentences.get_score(i) for i in range(count)]), bos_token_id=1, eos_token_id=2)

    @given(st.text(st.characters(exclude_characters="\0▁", exclude_categories=["Cs"])).filter(
        lambda text: not any(name in text for name in ("<s>", "</s>", "<unk>"))))
    @examples(300, quick=36)
    def same(text: str) -> None:
        assert ours.encode(text).ids == [1, *sentences.encode(text)]
        assert ours.decode(sentences.encode(text)) == sentences.decode(sentences.encode(text))

    same()


def test_runs_of_spaces_are_tokens_as_in_sentencepiece(tmp_path: Path) -> None:
    """A tokenizer as Gemma's: no space before a text, and tokens that are not merged from parts, of which llama.cpp's
    converter spells those of spaces as they are decoded, and forgets the scores."""
    whole = ["▁▁", "▁▁▁", "\n", "\n\n", "\t\t", "<b>"]
    (tmp_path / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), model_type="bpe", vocab_size=520,
        byte_fallback=True, character_coverage=1.0, minloglevel=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, add_dummy_prefix=False, user_defined_symbols=whole)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    tokens = [theirs.id_to_piece(i) for i in range(theirs.get_piece_size())]
    types = [UNKNOWN if theirs.is_unknown(i) else CONTROL if theirs.is_control(i) else BYTE if theirs.is_byte(i)
             else USER_DEFINED if token in whole else NORMAL for i, token in enumerate(tokens)]
    scores = [-1000.0 if token in whole else theirs.get_score(i) for i, token in enumerate(tokens)]
    ours = tokenizer(model="llama", tokens=[token.replace("▁", " ") if token in whole else token for token in tokens],
                     token_type=np.array(types), scores=np.array(scores), bos_token_id=1, add_space_prefix=False)

    pieces = st.sampled_from([" ", "  ", "     ", "\n", "\n\n\n", "\t", "\t\t\t", "▁", "<b>", "the ", "7", "東"])

    @given(st.lists(pieces | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9)
                    ).map("".join).filter(lambda text: not any(name in text for name in ("<s>", "</s>", "<unk>"))))
    @examples(300, quick=60)
    def same(text: str) -> None:
        assert ours.encode(text).ids == [1, *theirs.encode(text)]
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))

    same()


@pytest.mark.parametrize(("changes", "says"), [
    ({"model": "bert"}, "a tokenizer of the kind 'bert'"), ({"pre": "deepseek-v9"}, "cuts texts as 'deepseek-v9'"),
    ({"merges": ["a b c"]}, "a merge of its tokenizer is no pair"), ({"tokens": None}, "does not state tokenizer.ggml"),
    ({"add_bos_token": True, "bos_token_id": 10_000}, r"states 10000 for tokenizer\.ggml\.bos_token_id, and has"),
])
def test_what_is_not_known_is_one_line(byte_level: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(FlowspecError, match=says):
        tokenizer(**{**byte_level, **changes})
