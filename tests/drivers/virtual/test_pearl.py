"""PEARL and plain speculative decoding against what their papers say of block, ratio and modes."""

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
