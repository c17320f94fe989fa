"""Virtual time against times worked out by hand from the profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import UsageError

PROFILE = load_profile("paper-7b")


@pytest.mark.parametrize("stages", [1, 4, 8])
def test_plain_decoding_takes_the_sum_of_its_parts(eight_layers: Path, stages: int) -> None:
    """A token costs every stage, every link and lm_head, one after the other, and nothing else."""
    result = VirtualCluster(eight_layers, stages, PROFILE).generate(Request([1, 2, 3], "autoregressive", 6))
    row = PROFILE.model.hidden_width * PROFILE.model.bytes_per_value
    overhead = 0.0
    for size in [0.0] + [row] * stages:  # token ids to V1, then hidden rows from stage to stage
        # Headers and indexes of a message with one row are below 400 bytes.
        least, latency = PROFILE.link_seconds(int(size))
        overhead += least + latency
    compute = stages * PROFILE.stage_seconds(1, 32 / stages) + PROFILE.lm_head.ms / 1e3
    slack = (stages + 1) * PROFILE.link_seconds(400)[0]
    assert 5 * (compute + overhead) <= result.stats.decode_s <= 5 * (compute + overhead + slack)
    assert result.stats.turns == pytest.approx(result.stats.decode_s / PROFILE.stage_seconds(16, 32 / stages))
    assert result.stats.alt == pytest.approx(5 / result.stats.turns)
    assert result.stats.rounds == 5
    assert result.stats.alr == 1.0


def test_a_round_of_chunk_pp_is_charged_its_drafting(demo_model: Path) -> None:
    """Drafting, then N + 1 chunks through N stages: 2 N slots and the last output's lm_head."""
    result = VirtualCluster(demo_model, 4, PROFILE).generate(Request(list(range(300, 320)), "chunk_pp", 2))
    slots = 2 * 4 * PROFILE.stage_seconds(81 // 5, 8)
    drafting = 5 * PROFILE.draft.pass_ms / 1e3
    assert slots + drafting < result.stats.decode_s < slots + drafting + 0.05


def test_d0_works_while_the_stages_do(demo_model: Path, demo_prompts: list[list[int]]) -> None:
    """A continuous strategy must not pay for drafting on every turn: stages are busy most of the time."""
    stats = VirtualCluster(demo_model, 4, PROFILE).generate(Request(demo_prompts[2], "flowspec", 60)).stats
    assert sum(s["compute_s"] for s in stats.stages) > 0.8 * 4 * stats.decode_s


def test_more_stages_than_layers_pass_hidden_states_on(eight_layers: Path) -> None:
    few = VirtualCluster(eight_layers, 2, PROFILE).generate(Request([4, 5, 6], "flowspec", 8))
    many = VirtualCluster(eight_layers, 14, PROFILE).generate(Request([4, 5, 6], "flowspec", 8))
    assert many.tokens == few.tokens
    assert len(many.stats.stages) == 14


@pytest.mark.parametrize(("request_", "message"), [
    (Request([], "flowspec"), "prompt is empty"),
    (Request([1], "flowspec", 0), "max-new-tokens"),
    (Request([1], "nonesuch"), "no strategy 'nonesuch'"),
    (Request([1] * 2040, "flowspec", 100), "2040 tokens and 100 more"),
    (Request([4711], "flowspec"), "outside the vocabulary"),
])
def test_what_cannot_run_is_refused_in_one_line(eight_layers: Path, request_: Request, message: str) -> None:
    cluster = VirtualCluster(eight_layers, 2, PROFILE)
    with pytest.raises(UsageError, match=message) as caught:
        cluster.generate(request_)
    assert "\n" not in str(caught.value)
