"""Recurrent layers: every strategy gives the tokens of transformers' own ``generate``, or draws those of
plain decoding."""

from __future__ import annotations

from functools import lru_cache
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
SOME = ("chunk_pp", "flowspec_plus", "pipedec", "pipeinfer")
STAGES = {"qwen3-next": 3, "qwen3.5": 2, "qwen3.5-moe": 4}
DRAWN = Sampling(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("recurrent")
    return {name: family_dir(name, base / name) for name in STAGES}


@lru_cache(maxsize=1)
def cluster(model: Path, stages: int) -> VirtualCluster:
    return VirtualCluster(model, stages, load_profile("paper-7b"))


@lru_cache(maxsize=1)
def expected(model: Path) -> list[int]:
    return generated(model / "target", PROMPT, NEW)


@lru_cache(maxsize=1)
def drawn(model: Path, stages: int) -> list[int]:
    plain = Request(PROMPT, "autoregressive", NEW, sampling=DRAWN, params=SMALL)
    return cluster(model, stages).generate(plain).tokens


@pytest.mark.parametrize(("family", "name"), [*(("qwen3-next", name) for name in STRATEGIES),
                                              *(("qwen3.5-moe", name) for name in SOME),
                                              ("qwen3.5", "flowspec_plus"), ("qwen3.5", "pruned_pp")])
def test_tokens_are_those_of_generate(models: dict[str, Path], family: str, name: str) -> None:
    request = Request(PROMPT, name, NEW, params=SMALL)
    assert cluster(models[family], STAGES[family]).generate(request).tokens == expected(models[family])


@pytest.mark.parametrize(("family", "name"), [*(("qwen3.5", name) for name in SOME),
                                              ("qwen3-next", "flowspec"), ("qwen3-next", "stpp"),
                                              ("qwen3.5-moe", "flowspec_plus"), ("qwen3.5-moe", "chain")])
def test_drawn_tokens_are_those_of_plain_decoding(models: dict[str, Path], family: str, name: str) -> None:
    model, stages = models[family], STAGES[family]
    request = Request(PROMPT, name, NEW, sampling=DRAWN, params=SMALL)
    assert cluster(model, stages).generate(request).tokens == drawn(model, stages)
