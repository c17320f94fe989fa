"""Answers that must match a grammar: transformers' own ``generate``, with llguidance in a logits processor,
says which tokens every strategy has to give."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.cases import DISTINCT
from kits.transformers_generate import reference_text, target_of
from kits.virtual_clusters import cluster
from transformers import AutoTokenizer, LogitsProcessor

from flowspec_edge.d0.request import Request
from flowspec_edge.model.grammar import Grammar
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES

llguidance = pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"c": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["c", "n"], "additionalProperties": False,
}
WHITESPACE = {"whitespace_pattern": r"[ \n\r\t]{1,40}"}
SAMPLINGS = (Sampling(), Sampling(1.0, seed=11), Sampling(0.8, 40, 0.9, seed=12))
LIMIT = 24


class Masked(LogitsProcessor):
    """Excludes what the grammar does not allow after the tokens since the prompt."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: int, prompt: int) -> None:
        from llguidance.hf import from_tokenizer

        wrapped = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=eos)
        self.grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides=WHITESPACE)
        self.wrapped, self.prompt = wrapped, prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = llguidance.LLMatcher(self.wrapped, self.grammar)  # anew each time: no state to go wrong
        assert matcher.consume_tokens(ids[0, self.prompt:].tolist())
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=scores.shape[-1]).astype(bool)
        return scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)


@cache
def reference(model: Path, prompt: tuple[int, ...], sampling: Sampling) -> tuple[list[int], str]:
    tokenizer = AutoTokenizer.from_pretrained(model / "target")
    vocabulary = target_of(model).config.vocab_size
    masked = Masked(tokenizer, vocabulary, tokenizer.eos_token_id, len(prompt))
    return reference_text(model, prompt, sampling, LIMIT, [masked])


@cache
def grammar(model: Path) -> Grammar:
    found = OpenModel(model)
    return Tokenizer(found).grammars.json_schema(SCHEMA, found.stop_ids)


def check(model: Path, stages: int, prompt: tuple[int, ...], name: str, sampling: Sampling) -> int:
    """Returns how many draft tokens were accepted."""
    request = Request(prompt, name, LIMIT, sampling, Params(width=4, tree_size=20, depth=3),
                      OpenModel(model).stop_ids, grammar=grammar(model))
    result = cluster(model, stages).generate(request)
    assert (result.tokens, result.finish_reason) == reference(model, prompt, sampling)
    if result.finish_reason == "stop":
        answer = json.loads(Tokenizer(OpenModel(model)).decode(result.tokens))
        assert answer["c"] in ("red", "blue")
        assert 0 <= answer["n"] <= 99
    return result.stats.accepted


@pytest.mark.parametrize(("name", "stages"), [*((name, 1 + i % 3) for i, name in enumerate(DISTINCT)), *(
    pytest.param(name, 3, marks=pytest.mark.soak) for name in STRATEGIES if name not in DISTINCT)])
def test_every_strategy_gives_the_same_json(tiny_model: Path, name: str, stages: int) -> None:
    sampling = SAMPLINGS[[*STRATEGIES].index(name) % len(SAMPLINGS)]
    check(tiny_model, stages, tuple(range(20, 40)), name, sampling)


def test_drafts_are_accepted_within_the_grammar(demo_model: Path) -> None:
    prompt = tuple(Tokenizer(OpenModel(demo_model)).encode('x = {"c": "red", "n": 1}\ny = '))
    assert check(demo_model, 3, prompt, "flowspec_plus", Sampling()) > 0
