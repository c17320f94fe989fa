"""Mixtures of experts: sampled tokens, and what passes are charged and report."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.family_checkpoints import SMALL, FamilyDirs, family_dir
from kits.virtual_clusters import cluster
from kits.worker_thread import segment

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import StageCurve, load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.experts import independent
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.core import Pass

PROMPT = [5, 17, 42, 3, 3, 58, 11]
NEW = 12


@pytest.mark.parametrize(("stages", "name"), [(2, "flowspec_plus"), (2, "pipedec"), (3, "flowspec"),
                                              (3, "pipeinfer")])
def test_sampled_tokens_are_plain_decodings(families: FamilyDirs, stages: int, name: str) -> None:
    model, sampling = families["gpt-oss"], Sampling(1.0, seed=3)
    tokens, _ = PlainDecoder(model).generate(PROMPT, NEW, sampling)
    request = Request(PROMPT, name, NEW, sampling, SMALL)
    assert cluster(model, stages).generate(request).tokens == tokens


def test_passes_are_charged_by_what_they_touched(families: FamilyDirs) -> None:
    """Of the prompt, c same + (1 - c) independent with c = (U - touched) / (U - k); others by one row."""
    curve = StageCurve(layers=4, rows=[1, len(PROMPT)], ms=[10, 40], shared_ms=[10, 12], correlation=0.9)
    profile = load_profile("paper-7b").model_copy(update={"stage": curve})
    profile = profile.model_copy(update={"model": profile.model.model_copy(update={"layers": 4})})
    request = Request(PROMPT, "autoregressive", NEW, params=SMALL)
    result = VirtualCluster(families["qwen3-moe"], 4, profile).generate(request)
    for stage in result.stats.stages:
        single = stage["rows"] - len(PROMPT)
        found, most = stage["experts"] - 3 * single, independent(8, 3, len(PROMPT))
        share = (most - found) / (most - 3)
        prompt = 40 - share * (40 - 12)
        assert stage["compute_s"] == pytest.approx((prompt + single * 10) / 4e3)


def test_stages_report_the_experts_that_rows_touched(families: FamilyDirs) -> None:
    """In plain decoding every row behind the prompt is a segment of its own and touches k experts a layer."""
    result = cluster(families["qwen3-moe"], 3).generate(Request(PROMPT, "autoregressive", NEW, params=SMALL))
    experts, chosen = 8, 3
    for stage, layers in zip(result.stats.stages, (2, 1, 1), strict=True):
        single = stage["rows"] - len(PROMPT)
        assert stage["experts_independent"] == pytest.approx(
            layers * (single * chosen + independent(experts, chosen, len(PROMPT))))
        prompt = stage["experts"] - layers * single * chosen
        assert layers * chosen <= prompt <= layers * experts


def test_rows_of_several_requests_are_charged_as_choosing_by_themselves(tmp_path: Path) -> None:
    """Requests of one token of prompt have one row each in every pass of plain decoding, so that no two rows of a pass
    are of one request: the profile's correlation counts for nothing. The model has no experts that would say."""
    model = family_dir("qwen3", tmp_path / "qwen3")

    def decoding_s(correlation: float, prompt: list[int], requests: int) -> float:
        curve = StageCurve(layers=4, rows=[1, 8], ms=[10, 40], shared_ms=[10, 12], correlation=correlation)
        profile = load_profile("paper-7b")
        profile = profile.model_copy(update={"stage": curve})
        many = [Request(prompt, "autoregressive", NEW, params=SMALL)] * requests
        results = VirtualCluster(model, 2, profile).generate_many(many)
        return max(result.stats.decode_s + result.stats.ttft_s for result in results)

    assert decoding_s(0.9, PROMPT[:1], 4) == decoding_s(0.0, PROMPT[:1], 4)
    assert decoding_s(0.9, PROMPT, 1) < decoding_s(0.0, PROMPT, 1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_alike_is_the_share_of_pairs_of_one_request(rows: list[int]) -> None:
    begun = Pass([], [segment(0, rows=n, session=1 + i) for i, n in enumerate(rows)], 0, lambda poll: None)
    owners = [i for i, n in enumerate(rows) for _ in range(n)]
    pairs = [a == b for a, b in combinations(owners, 2)]
    assert begun.alike == pytest.approx(sum(pairs) / len(pairs) if pairs else 1.0)
