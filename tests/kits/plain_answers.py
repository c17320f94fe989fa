"""What plain decoding answers to a text, read and written by transformers' own tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sampling.rule import Sampling
from kits.requests import plain


@cache
def tokenizer_of(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model / "target")


def plain_tokens(model: Path, prompt: str | list[int], count: int, sampling: Sampling | None = None) -> list[int]:
    """At most ``count``, up to the model's own end."""
    ids = tokenizer_of(model)(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    return plain(model).generate(ids, count, sampling or Sampling(), OpenModel(model).stop_ids)[0]


def plain_text(model: Path, prompt: str | list[int], count: int, sampling: Sampling | None = None) -> str:
    text: str = tokenizer_of(model).decode(plain_tokens(model, prompt, count, sampling))
    return text
