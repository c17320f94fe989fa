"""The tokenizer in a GGUF file's metadata, as tokenizer.json and tokenizer_config.json.

Byte-level BPE ("gpt2") cuts a text by a pattern before it merges: the metadata names the pattern, and these are the
ones that the models' own tokenizers have.  SentencePiece's BPE ("llama") states scores instead of merges.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from flowspec_edge.errors import FlowspecError, UsageError, first_line
from flowspec_edge.model.gguf.config import Fields

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type; 2: unknown
_UNKNOWN = 2
_SPACE = "▁"  # as which SentencePiece writes a space
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER_CHARACTERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*")
# By tokenizer.ggml.pre: the pattern of pieces ("": GPT-2's), and whether digits stand alone before it.
_PATTERNS = {
    "gpt-2": ("", False), "default": ("", False), "smollm": ("", True),
    "llama-bpe": (rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHER_CHARACTERS}", False),
    "qwen2": (rf"{_SHORT}|{_WORDS}|\p{{N}}|{_OTHER_CHARACTERS}", False),
    "tekken": (rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+", False),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")  # a piece that is a token is not merged from its parts
_COMPOSED = ("qwen2",)  # normalised to Unicode's NFC


def write_tokenizer(fields: Fields, directory: Path) -> None:
    """Write the tokenizer's files and the chat template to ``directory``.

    UsageError for a kind of tokenizer that is not known; FlowspecError for fields that do not fit together.
    """
    try:
        tokenizer = tokenizer_of(fields)
    except Exception as error:
        if isinstance(error, FlowspecError):
            raise
        raise FlowspecError(f"{fields.path}: its tokenizer cannot be used ({first_line(error)})") from error
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    tokens = _tokens(fields)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = _id(fields, f"{key}_token_id", len(tokens))
        if number is not None:
            settings[f"{name}_token"] = tokens[number]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    template = fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def tokenizer_of(fields: Fields) -> Tokenizer:
    """Build the tokenizer; errors as for :func:`write_tokenizer`, and those of the library."""
    kind = fields.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UsageError(f"{fields.path}: a tokenizer of the kind {kind!r} cannot be read: put the model's "
                         "tokenizer.json beside the file")
    tokens = _spelled(fields)
    tokenizer = _byte_level(fields, tokens) if kind == "gpt2" else _sentencepiece(fields, tokens)
    types = fields.get("tokenizer.ggml.token_type")
    types = [] if types is None else types.tolist()
    tokenizer.add_tokens([AddedToken(token, normalized=_SPACE in token, special=token_type == _CONTROL)
                          for token, token_type in zip(tokens, types, strict=False)
                          if token_type in (_CONTROL, _USER_DEFINED)])
    begins = fields.get("tokenizer.ggml.add_bos_token")
    bos = _id(fields, "bos_token_id", len(tokens))
    if bos is not None and (kind == "llama" if begins is None else begins):
        first = processors.TemplateProcessing(single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B",
                                              special_tokens=[(tokens[bos], bos)])
        tokenizer.post_processor = first if kind == "llama" else processors.Sequence([tokenizer.post_processor, first])
    return tokenizer


def _spelled(fields: Fields) -> list[str]:
    """Return the tokens, with spaces spelled as texts are before they are cut.

    llama.cpp's converter writes runs of spaces (Gemma's tokens 138 to 167) as they are decoded.
    """
    tokens = _tokens(fields)
    if fields.text("tokenizer.ggml.model") != "llama" or _is_prefixed(fields):
        return tokens
    return [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]


def _is_prefixed(fields: Fields) -> bool:
    """Return whether a space is put before a text."""
    return fields.get("tokenizer.ggml.add_space_prefix") is not False


def _byte_level(fields: Fields, tokens: Sequence[str]) -> Tokenizer:
    name = fields.get("tokenizer.ggml.pre") or "default"
    if name not in _PATTERNS:
        raise UsageError(f"{fields.path}: its tokenizer cuts texts as {name!r}, which is not known here (known: "
                         f"{', '.join(_PATTERNS)}): put the model's tokenizer.json beside the file")
    pattern, digits = _PATTERNS[name]
    tokenizer = Tokenizer(models.BPE(_numbered(tokens), _merges(fields), ignore_merges=name in _WHOLE_WORDS_FIRST))
    cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        cuts.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts) if len(cuts) > 1 else cuts[0]
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentencepiece(fields: Fields, tokens: Sequence[str]) -> Tokenizer:
    scores = fields.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise fields.unusable("tokenizer.ggml.scores", scores, f"{len(tokens)} numbers, one for each token")
    types = fields.get("tokenizer.ggml.token_type")
    unknown = next((token for token, token_type in zip(tokens, types if types is not None else (), strict=False)
                    if token_type == _UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(_numbered(tokens), _merges_by_score(tokens, scores.tolist()), unk_token=unknown,
                                     fuse_unk=True, byte_fallback=True))
    prefixed = _is_prefixed(fields)
    changes: list[Any] = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *changes] if prefixed else changes)
    back: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefixed else back)
    return tokenizer


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Find all pairs that make a token.  SentencePiece merges the pair whose token has the highest score."""
    numbers = _numbered(tokens)
    pairs = [(-scores[number], numbers[token[:cut]], numbers[token[cut:]])
             for token, number in numbers.items() for cut in range(1, len(token))
             if token[:cut] in numbers and token[cut:] in numbers]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(pairs)]


def _merges(fields: Fields) -> list[tuple[str, str]]:
    merges = fields.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise fields.unusable("tokenizer.ggml.merges", merges, "pairs of tokens")
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise FlowspecError(f"{fields.path} is damaged: a merge of its tokenizer is no pair of tokens")
    return [(left, right) for left, right in pairs]


def _tokens(fields: Fields) -> list[str]:
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise fields.unusable("tokenizer.ggml.tokens", tokens, "a list of tokens")
    return tokens


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _id(fields: Fields, name: str, tokens: int) -> int | None:
    number = fields.get(f"tokenizer.ggml.{name}")
    if number is not None and not (isinstance(number, int) and 0 <= number < tokens):
        raise FlowspecError(f"{fields.path} states {number!r} for tokenizer.ggml.{name}, and has {tokens} tokens")
    return number
