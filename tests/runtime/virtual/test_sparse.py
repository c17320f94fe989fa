"""Mixtures of experts: every strategy gives the tokens of transformers' own ``generate``."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from familykit import family_dir
from transformers import AutoModelForCausalLM

from flowspec_edge.device_profile import load_profile
from flowspec_edge.runtime.request import Request
from flowspec_edge.runtime.virtual.cluster import VirtualCluster
from flowspec_edge.stage.layers.experts import independent
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES

PROMPT = [5, 17, 42, 3, 3, 58, 11]
NEW = 12
SMALL = Params(tree_size=12, width=3, depth=3, expand_depth=2, expand_size=8, extend_size=8, segment=5,
               pipedec_width=4, pipedec_children=3)
PIPELINES = [name for name, strategy in STRATEGIES.items() if strategy.parallelism == "pipeline"]
CASES = [("qwen3-moe", 3), ("mixtral", 2), ("gpt-oss", 4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("sparse")
    return {name: family_dir(name, base / name) for name, _ in CASES}


@lru_cache(maxsize=2)
def cluster(model: Path, stages: int) -> VirtualCluster:
    return VirtualCluster(model, stages, load_profile("paper-7b"))


@lru_cache(maxsize=2)
def expected(model: Path) -> list[int]:
    whole: Any = AutoModelForCausalLM.from_pretrained(model / "target").eval()
    whole.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    out = whole.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    return list(out[0, len(PROMPT):].tolist())


@pytest.mark.parametrize(("family", "stages"), CASES)
@pytest.mark.parametrize("name", PIPELINES)
def test_tokens_are_those_of_generate(models: dict[str, Path], family: str, stages: int, name: str) -> None:
    request = Request(PROMPT, name, NEW, params=SMALL)
    assert cluster(models[family], stages).generate(request).tokens == expected(models[family])


def test_stages_report_the_experts_that_rows_touched(models: dict[str, Path]) -> None:
    """In plain decoding every row behind the prompt is a segment of its own and touches k experts a layer."""
    result = cluster(models["qwen3-moe"], 3).generate(Request(PROMPT, "autoregressive", NEW, params=SMALL))
    experts, chosen = 8, 3
    for stage, layers in zip(result.stats.stages, (2, 1, 1), strict=True):
        single = stage["rows"] - len(PROMPT)
        assert stage["experts_independent"] == pytest.approx(
            layers * (single * chosen + independent(experts, chosen, len(PROMPT))))
        prompt = stage["experts"] - layers * single * chosen
        assert layers * chosen <= prompt <= layers * experts
