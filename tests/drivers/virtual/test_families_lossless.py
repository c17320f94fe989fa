"""Every family, every strategy: the tokens are those of transformers' own greedy ``generate``."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
from kits.family_checkpoints import FAMILIES, SMALL, family_dir, generated

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.strategies.registry import STRATEGIES

PROMPT = [5, 17, 42, 3, 3, 58, 11]
NEW = 8
STAGES = (2, 4)
# One of each family; tests/stage compares the logits of all.
SOME = ("llama-llama3", "mistral-window", "qwen2-tied", "qwen3-tied-yarn", "gemma3-tied")
# Families and numbers of stages take turns over the strategies, and FlowSpec+ has every family.
PAIRS = [(family, name, STAGES[(i // 2 + j // 2) % 2]) for i, family in enumerate(SOME)
         for j, name in enumerate(STRATEGIES) if i == j % len(SOME) or name == "flowspec_plus"]


class Models(dict[str, Path]):
    """Model directories by family, each made when it is first wanted."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def __missing__(self, family: str) -> Path:
        self[family] = family_dir(family, self._base / family)
        return self[family]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Models(tmp_path_factory.mktemp("families"))


@lru_cache(maxsize=4)
def cluster(model: Path, stages: int) -> VirtualCluster:
    return VirtualCluster(model, stages, load_profile("paper-7b"))


@lru_cache(maxsize=len(FAMILIES))
def wanted(target: Path) -> list[int]:
    return generated(target, PROMPT, NEW)


def check(model: Path, name: str, stages: int) -> None:
    expected = wanted(model / "target")
    assert len(expected) == NEW
    result = cluster(model, stages).generate(Request(PROMPT, name, NEW, params=SMALL))
    assert result.tokens == expected, f"{name}, {stages} stages"


@pytest.mark.parametrize(("family", "name", "stages"), PAIRS)
def test_tokens_of_all_strategies(models: dict[str, Path], family: str, name: str, stages: int) -> None:
    """Over two stages or four."""
    check(models[family], name, stages)


@pytest.mark.parametrize(("stages", "name", "draft"), [
    (1, "flowspec_plus", "ngram"), (2, "autoregressive", "own"), (4, "flowspec", "own")])
def test_two_rotary_embeddings_and_windows_shorter_than_the_text(models: dict[str, Path], stages: int, name: str,
                                                                 draft: str) -> None:
    """Layers of both types on one stage, and on stages of one type alone."""
    model, prompt = models["gemma3"], PROMPT * 3
    request = Request(prompt, name, 2 * NEW, params=SMALL.changed(draft=draft))
    assert cluster(model, stages).generate(request).tokens == generated(model / "target", prompt, 2 * NEW)
