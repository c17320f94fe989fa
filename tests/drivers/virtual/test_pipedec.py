"""PipeDec, and a chain, against the law of its paper: tokens per timestep = 1 / (d (1 - h) + h)."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import Profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.strategies.params import Params


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages"), [*(("pipedec", n) for n in (1, 4, 7)), ("chain", 4)])
def test_tokens_per_timestep(demo_model: Path, demo_prompts: list[list[int]], ideal_profile: Profile,
                             name: str, stages: int) -> None:
    """A timestep is a slot where nothing but the stages takes time; hits are counted by the commits."""
    cluster = VirtualCluster(demo_model, stages, ideal_profile)
    tokens, hits, timesteps = 0, 0, 0.0
    for prompt in demo_prompts[:2]:
        stats = cluster.generate(Request(prompt, name, 33)).stats
        tokens, hits, timesteps = tokens + 32, hits + stats.accepted, timesteps + stats.turns
    h = hits / tokens
    assert 0.3 < h < 1.0
    # The law counts a fill of the pipeline for every miss; a text starts with one more.
    starts = 2 * (stages - 1) / timesteps
    assert tokens / timesteps == pytest.approx(1 / (stages * (1 - h) + h), rel=starts + 1e-9)
    if stages == 1:
        assert timesteps == pytest.approx(tokens)


def test_a_perfect_draft_yields_a_token_a_timestep(oracle_draft_model: Path, demo_prompts: list[list[int]],
                                                   ideal_profile: Profile) -> None:
    cluster = VirtualCluster(oracle_draft_model, 4, ideal_profile)
    # One branch: of many, the greedy one need not be among the best by cumulative probability.
    stats = cluster.generate(Request(demo_prompts[2], "pipedec", 41, params=Params(pipedec_width=1))).stats
    assert stats.accepted == 40
    assert stats.turns == pytest.approx(4 + 39)  # the first token fills the pipeline
