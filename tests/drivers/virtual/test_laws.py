"""PEARL and plain speculative decoding against what their papers say of block, ratio and modes; PipeDec, and a chain,
against the law of PipeDec's paper: tokens per timestep = 1 / (d (1 - h) + h)."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import Profile, load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.strategies.params import Params

PROFILE = load_profile("paper-7b")


def speed(cluster: VirtualCluster, prompts: list[list[int]], name: str, params: Params) -> float:
    stats = [cluster.generate(Request(p, name, 40, params=params)).stats for p in prompts]
    return 39 * len(stats) / sum(s.decode_s for s in stats)


@pytest.mark.soak
def test_the_best_block_is_the_speed_ratio(demo_model: Path, demo_prompts: list[list[int]]) -> None:
    """T_target / T_draft: four stages of 80 ms and the way through, over 45 ms, is 7.3."""
    cluster = VirtualCluster(demo_model, 4, PROFILE)
    speeds = {g: speed(cluster, demo_prompts[:4], "pearl", Params(pearl_gamma=g)) for g in (3, 7, 12)}
    assert max(speeds, key=speeds.__getitem__) == 7
    assert speed(cluster, demo_prompts[:4], "pearl", Params()) == speeds[7]  # the default finds it


def test_a_perfect_draft_stays_in_post_verify(oracle_draft_model: Path, demo_prompts: list[list[int]],
                                              ideal_profile: Profile) -> None:
    """One pre-verification, then a whole block each time: 4 slots a verification."""
    cluster = VirtualCluster(oracle_draft_model, 4, ideal_profile)
    stats = cluster.generate(Request(demo_prompts[2], "pearl", 41, params=Params(pearl_gamma=5))).stats
    # Token 2 comes with the pre-verification, and then five with every block.
    assert stats.accepted == 40
    assert stats.turns == pytest.approx(4 * (1 + 39 / 5), abs=4)
    assert stats.rounds == 1


def test_a_useless_draft_stays_in_pre_verify(untrained_draft_model: Path, demo_prompts: list[list[int]],
                                             ideal_profile: Profile) -> None:
    """Nothing is verified but the newest token: the pace of plain decoding, and no row wasted."""
    cluster = VirtualCluster(untrained_draft_model, 4, ideal_profile)
    stats = cluster.generate(Request(demo_prompts[0], "pearl", 21, params=Params(pearl_gamma=5))).stats
    assert stats.accepted == 0
    assert stats.drafted == 0
    assert stats.turns == pytest.approx(4 * 20)


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_perfect_chain_yields_gamma_and_one_more(oracle_draft_model: Path, demo_prompts: list[list[int]],
                                                   ideal_profile: Profile, gamma: int) -> None:
    cluster = VirtualCluster(oracle_draft_model, 2, ideal_profile)
    params = Params(speculative_gamma=gamma)
    stats = cluster.generate(Request(demo_prompts[2], "speculative", 25, params=params)).stats
    assert stats.alr == gamma + 1
    assert stats.turns == pytest.approx(2 * 24 / (gamma + 1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages"), [*(("pipedec", n) for n in (1, 4, 7)), ("chain", 4)])
def test_pipedecs_tokens_per_timestep(demo_model: Path, demo_prompts: list[list[int]], ideal_profile: Profile,
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


def test_a_perfect_draft_of_pipedec_yields_a_token_a_timestep(oracle_draft_model: Path, demo_prompts: list[list[int]],
                                                   ideal_profile: Profile) -> None:
    cluster = VirtualCluster(oracle_draft_model, 4, ideal_profile)
    # One branch: of many, the greedy one need not be among the best by cumulative probability.
    stats = cluster.generate(Request(demo_prompts[2], "pipedec", 41, params=Params(pipedec_width=1))).stats
    assert stats.accepted == 40
    assert stats.turns == pytest.approx(4 + 39)  # the first token fills the pipeline
