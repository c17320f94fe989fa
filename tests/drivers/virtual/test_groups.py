"""Megatron-LM and Galaxy in virtual time: computed whole, charged as groups of devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kits.process_clusters import PROMPT
from kits.requests import text

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.devices import tensor_bytes, tensor_seconds
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.strategies.params import Params

KINDS: tuple[Parallelism, ...] = ("megatron", "galaxy")
SAMPLINGS = (Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=5))
PROFILE = load_profile("paper-7b")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [1, 2, 4, 7])
def test_virtual_groups_give_the_tokens_of_plain_decoding(model: Path, devices: int,
                                                          kind: Parallelism) -> None:
    cluster = VirtualCluster(model, devices, PROFILE)
    for sampling in SAMPLINGS:
        result = cluster.generate(Request(PROMPT, kind, 16, sampling, Params(tree_size=22)))
        assert result.tokens == text(model, tuple(PROMPT), 16, sampling)


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_takes_the_sum_of_its_parts(model: Path, kind: Parallelism) -> None:
    """Drafting, the token ids to the last device, one segment on all devices, its output, lm_head."""
    cluster = VirtualCluster(model, 4, PROFILE)
    result = cluster.generate(Request(PROMPT, kind, 2))
    passes = sum(span.kind == "draft" for span in cluster.spans)
    latency = PROFILE.link.latency_ms / 1e3
    output = PROFILE.link_seconds(81 * 4096 * 2)[0]
    parts = (passes * PROFILE.draft_seconds("eagle2") + 4 * latency + tensor_seconds(PROFILE, kind, 81, 4)
             + output + latency + PROFILE.lm_head.ms / 1e3)
    headers = 2 * PROFILE.link_seconds(4000)[0]
    assert parts < result.stats.decode_s < parts + headers
    slot = PROFILE.stage_seconds(16, 8)
    assert result.stats.turns == pytest.approx(result.stats.decode_s / slot)  # a pipeline's slot


@pytest.mark.parametrize("kind", KINDS)
def test_the_devices_of_a_virtual_group_are_busy_together(model: Path, kind: Parallelism) -> None:
    cluster = VirtualCluster(model, 3, PROFILE)
    stats = cluster.generate(Request(PROMPT, kind, 2)).stats
    by_device = [[(s.start, s.end, s.rows) for s in cluster.spans if s.device == d] for d in (1, 2, 3)]
    assert by_device[0] == by_device[1] == by_device[2] != []
    assert [rows for _, _, rows in by_device[0]] == [64, 6, 81]
    exchanged = sum(tensor_bytes(PROFILE, kind, rows, 3) for rows in (64, 6, 81))
    assert sum(stage["collective_bytes"] for stage in stats.stages) == pytest.approx(exchanged)
    outputs = 151 * 4096 * 2
    assert exchanged + outputs < stats.bytes < exchanged + outputs + 20_000
    busy = sum(tensor_seconds(PROFILE, kind, rows, 3) for rows in (64, 6, 81))
    assert np.allclose([stage["compute_s"] for stage in stats.stages], busy)
