"""Every family, every strategy: the tokens are those of transformers' own greedy ``generate``."""

from __future__ import annotations

import pytest
from kits.family_checkpoints import SMALL, FamilyDirs, generated
from kits.virtual_clusters import cluster

from flowspec_edge.d0.request import Request
from flowspec_edge.strategies.registry import STRATEGIES

PROMPT = [5, 17, 42, 3, 3, 58, 11]
NEW = 8
STAGES = (2, 4)
# One of each family; tests/stage compares the logits of all.
DENSE = ("llama-llama3", "mistral-window", "qwen2-tied", "qwen3-tied-yarn", "gemma3-tied")
SPARSE = ("qwen3-moe", "mixtral", "gpt-oss")
# Families and numbers of stages take turns over the strategies, and FlowSpec+ has every family.
CASES = [(family, name, STAGES[(i // 2 + j // 2) % 2]) for some in (DENSE, SPARSE) for i, family in enumerate(some)
         for j, name in enumerate(STRATEGIES) if i == j % len(some) or name == "flowspec_plus"]


@pytest.mark.parametrize(("family", "name", "stages"), CASES)
def test_tokens_of_all_strategies(families: FamilyDirs, family: str, name: str, stages: int) -> None:
    model = families[family]
    result = cluster(model, stages).generate(Request(PROMPT, name, NEW, params=SMALL))
    assert result.tokens == generated(model / "target", PROMPT, NEW)


@pytest.mark.parametrize(("stages", "name", "draft"), [
    (1, "flowspec_plus", "ngram"), (2, "autoregressive", "own"), (4, "flowspec", "own")])
def test_two_rotary_embeddings_and_windows_shorter_than_the_text(families: FamilyDirs, stages: int, name: str,
                                                                 draft: str) -> None:
    """Layers of both types on one stage, and on stages of one type alone."""
    model, prompt = families["gemma3"], PROMPT * 3
    request = Request(prompt, name, 2 * NEW, params=SMALL.changed(draft=draft))
    assert cluster(model, stages).generate(request).tokens == generated(model / "target", prompt, 2 * NEW)
