"""Mixtures of experts: every strategy gives the tokens of transformers' own ``generate``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from kits.family_checkpoints import SMALL, family_dir, generated

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import StageCurve, load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.experts import independent
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.registry import STRATEGIES

PROMPT = [5, 17, 42, 3, 3, 58, 11]
NEW = 12
STAGES = {"qwen3-moe": 3, "mixtral": 2, "gpt-oss": 4}
# Families take turns over the strategies, and FlowSpec+ has every one.
CASES = [*((list(STAGES)[place % 3], name) for place, name in enumerate(STRATEGIES)),
         *((family, "flowspec_plus") for family in ("qwen3-moe", "mixtral"))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("sparse")
    return {name: family_dir(name, base / name) for name in STAGES}


@cache
def cluster(model: Path, stages: int) -> VirtualCluster:
    return VirtualCluster(model, stages, load_profile("paper-7b"))


@cache
def expected(model: Path) -> list[int]:
    return generated(model / "target", PROMPT, NEW)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_tokens_are_those_of_generate(models: dict[str, Path], family: str, name: str) -> None:
    request = Request(PROMPT, name, NEW, params=SMALL)
    assert cluster(models[family], STAGES[family]).generate(request).tokens == expected(models[family])


@pytest.mark.parametrize(("stages", "name"), [(2, "flowspec_plus"), (2, "pipedec"), (3, "flowspec"),
                                              (3, "pipeinfer")])
def test_sampled_tokens_are_plain_decodings(models: dict[str, Path], stages: int, name: str) -> None:
    model, sampling = models["gpt-oss"], Sampling(1.0, seed=3)
    tokens, _ = PlainDecoder(model).generate(PROMPT, NEW, sampling)
    request = Request(PROMPT, name, NEW, sampling, SMALL)
    assert cluster(model, stages).generate(request).tokens == tokens


def test_passes_are_charged_by_what_they_touched(models: dict[str, Path]) -> None:
    """Of the prompt, c same + (1 - c) independent with c = (U - touched) / (U - k); others by one row."""
    curve = StageCurve(layers=4, rows=[1, len(PROMPT)], ms=[10, 40], shared_ms=[10, 12], correlation=0.9)
    profile = load_profile("paper-7b").model_copy(update={"stage": curve})
    profile = profile.model_copy(update={"model": profile.model.model_copy(update={"layers": 4})})
    request = Request(PROMPT, "autoregressive", NEW, params=SMALL)
    result = VirtualCluster(models["qwen3-moe"], 4, profile).generate(request)
    for stage in result.stats.stages:
        single = stage["rows"] - len(PROMPT)
        found, most = stage["experts"] - 3 * single, independent(8, 3, len(PROMPT))
        share = (most - found) / (most - 3)
        prompt = 40 - share * (40 - 12)
        assert stage["compute_s"] == pytest.approx((prompt + single * 10) / 4e3)


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
