"""Recurrent layers: every strategy gives the tokens of transformers' own ``generate``, or draws those of
plain decoding."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from kits.family_checkpoints import SMALL, VOCAB, family_dir, generated
from kits.stages import random_tokens

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("recurrent")
    return {name: family_dir(name, base / name) for name in STAGES}


@cache
def cluster(model: Path, stages: int) -> VirtualCluster:
    return VirtualCluster(model, stages, load_profile("paper-7b"))


@cache
def expected(model: Path, stages: int, sampling: Sampling) -> list[int]:
    if sampling.greedy:
        return generated(model / "target", PROMPT, NEW)
    plain = Request(PROMPT, "autoregressive", NEW, sampling=sampling, params=SMALL)
    return cluster(model, stages).generate(plain).tokens


@pytest.mark.parametrize(("family", "name", "kind"), CASES)
def test_tokens_are_those_of_generate_or_plain_decoding(models: dict[str, Path], family: str, name: str, kind: str
                                                        ) -> None:
    model, stages, sampling = models[family], STAGES[family], SAMPLINGS[kind]
    request = Request(PROMPT, name, NEW, sampling=sampling, params=SMALL)
    assert cluster(model, stages).generate(request).tokens == expected(model, stages, sampling)
