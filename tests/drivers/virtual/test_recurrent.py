"""Recurrent layers: every strategy gives the tokens of transformers' own ``generate``, or draws those of
plain decoding."""

from __future__ import annotations

import pytest
from kits.family_checkpoints import SMALL, VOCAB, FamilyDirs, generated
from kits.stages import random_tokens
from kits.virtual_clusters import cluster

from flowspec_edge.d0.request import Request
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.registry import STRATEGIES

PROMPT = random_tokens(21, VOCAB, seed=7)
NEW = 24  # more than are folded at once
STAGES = {"qwen3-next": 3, "qwen3.5": 2, "qwen3.5-moe": 4}
SAMPLINGS = {"greedy": Sampling(), "drawn": Sampling(temperature=1.0, seed=3)}
# Families and samplings take turns over the strategies, and those of FlowSpec have every family.
WAYS = [(family, kind) for kind in SAMPLINGS for family in STAGES]
CASES = [*((WAYS[place % len(WAYS)][0], name, WAYS[place % len(WAYS)][1]) for place, name in enumerate(STRATEGIES)),
         ("qwen3-next", "flowspec_plus", "greedy"), ("qwen3.5-moe", "flowspec_plus", "drawn"),
         ("qwen3-next", "pipeinfer", "drawn")]


@pytest.mark.parametrize(("family", "name", "kind"), CASES)
def test_tokens_are_those_of_generate_or_plain_decoding(families: FamilyDirs, family: str, name: str,
                                                        kind: str) -> None:
    model, sampling = families[family], SAMPLINGS[kind]

    def tokens(strategy: str) -> list[int]:
        return cluster(model, STAGES[family]).generate(Request(PROMPT, strategy, NEW, sampling, SMALL)).tokens

    assert tokens(name) == (generated(model / "target", PROMPT, NEW) if sampling.greedy else tokens("autoregressive"))
