"""Tensor-parallel clusters: ranks as processes, and one group in virtual time.

Tokens are compared with transformers' own decoding of the unsharded model; ranks are killed and
stopped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kits.process_clusters import PATIENCE, PROMPT, alive, on_third

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.processes.clusters import OnDemandCluster, open_cluster
from flowspec_edge.drivers.processes.membership import Membership
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.devices import tensor_bytes, tensor_seconds
from flowspec_edge.errors import FlowspecError, PeerLost, ProtocolError, UsageError
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.messages import Hello
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.base import Parallelism
from flowspec_edge.strategies.params import Params

KINDS: tuple[Parallelism, ...] = ("megatron", "galaxy")
SAMPLINGS = (Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=5))
PROFILE = load_profile("paper-7b")


@pytest.fixture(scope="module")
def plain(model: Path) -> PlainDecoder:
    return PlainDecoder(model)


@pytest.fixture(scope="module")
def clusters(model: Path) -> Iterator[OnDemandCluster]:
    """Three ranks for four query heads and two layers."""
    with open_cluster(ClusterSpec(model, 3, threads=1)) as made:
        yield made


def same_tokens(clusters: OnDemandCluster, plain: PlainDecoder, strategy: str) -> None:
    for sampling in SAMPLINGS:
        streamed: list[int] = []
        request = Request(PROMPT, strategy, 16, sampling, Params(tree_size=22))
        result = clusters.generate(request, streamed.extend)
        assert result.tokens == streamed == plain.generate(PROMPT, 16, sampling)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_processes_give_the_tokens_of_plain_decoding(clusters: OnDemandCluster, plain: PlainDecoder,
                                                     kind: Parallelism) -> None:
    same_tokens(clusters, plain, kind)
    assert clusters.running is not None
    assert clusters.running.parallelism == kind
    with pytest.raises(UsageError, match=f"chunk_pp runs on a pipeline, but this cluster is a {kind} group"):
        clusters.running.generate(Request(PROMPT, "chunk_pp"))


def test_an_interrupted_request_leaves_the_ranks_agreed(clusters: OnDemandCluster,
                                                        plain: PlainDecoder) -> None:
    """All ranks compute what was on its way; the next request is not affected."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            clusters.generate(Request(PROMPT, "galaxy", 200), on_third(interrupt))
    running = clusters.running
    same_tokens(clusters, plain, "galaxy")
    assert clusters.running is running


def test_every_rank_reports_the_same_work(clusters: OnDemandCluster) -> None:
    stats = clusters.generate(Request(PROMPT, "galaxy", 6)).stats
    assert len(stats.stages) == 3
    for counted in ("rows", "segments", "collective_bytes", "pruned_rows"):
        assert len({stage[counted] for stage in stats.stages}) == 1
    assert stats.stages[0]["pruned_rows"] == 0
    assert stats.stages[0]["bytes_out"] == stats.stages[1]["bytes_in"] == stats.stages[1]["bytes_out"] > 0
    assert stats.bytes > sum(stage["collective_bytes"] + stage["bytes_out"] for stage in stats.stages)
    assert stats.slot_s > 0


@pytest.mark.soak
def test_the_cluster_before_is_closed_when_the_kind_changes(model: Path, plain: PlainDecoder) -> None:
    with open_cluster(ClusterSpec(model, 2, threads=1)) as clusters:
        same_tokens(clusters, plain, "megatron")
        first = clusters.running
        assert first is not None
        pids = first.pids
        with pytest.raises(UsageError, match="no strategy 'nonesuch'"):
            clusters.generate(Request(PROMPT, "nonesuch"))
        same_tokens(clusters, plain, "flowspec")
        assert first.closed
        assert not any(map(alive, pids))
        second = clusters.running
        assert second is not None
        pids = second.pids
        with pytest.raises(UsageError, match="galaxy runs on a galaxy group, but this cluster is a pipeline"):
            second.generate(Request(PROMPT, "galaxy"))
        assert all(map(alive, pids))
    assert not any(map(alive, pids))
    with pytest.raises(FlowspecError, match="the clusters are closed"):
        clusters.generate(Request(PROMPT))


@pytest.mark.parametrize(("kind", "victim", "number", "dead_after", "text"), [
    ("megatron", 1, signal.SIGKILL, PATIENCE, "V2 was killed by SIGKILL"),
    pytest.param("galaxy", 0, signal.SIGKILL, PATIENCE, "V1 was killed by SIGKILL", marks=pytest.mark.soak),
    pytest.param("galaxy", 1, signal.SIGSTOP, PATIENCE, "V2 was stopped", marks=pytest.mark.soak),
])
def test_a_lost_rank_is_named_and_the_others_are_reaped(
        model: Path, plain: PlainDecoder, kind: Parallelism, victim: int, number: signal.Signals,
        dead_after: float, text: str) -> None:
    """A rank that waits for a stopped one in a collective still answers, so the right one is named."""
    with open_cluster(ClusterSpec(model, 2, threads=1, dead_after=dead_after)) as clusters:
        clusters.generate(Request(PROMPT, kind, 1))
        running = clusters.running
        assert running is not None
        pids = running.pids
        with pytest.raises(PeerLost, match=text) as caught:
            clusters.generate(Request(PROMPT, kind, 1000), on_third(lambda: os.kill(pids[victim], number)))
        assert "\n" not in str(caught.value)
        assert not any(map(alive, pids))
        if kind == "megatron":  # the next request starts another cluster
            expected = plain.generate(PROMPT, 4, Sampling())[0]
            assert clusters.generate(Request(PROMPT, kind, 4)).tokens == expected


def test_ranks_must_know_where_to_meet() -> None:
    settings = {"instance": "v1", "stage": 1, "stages": 2, "model": "m", "control": "c", "listen": "l",
                "next": "n", "parallelism": "galaxy"}
    with pytest.raises(ValueError, match="group must say where the ranks meet"):
        WorkerConfig.model_validate(settings)
    WorkerConfig.model_validate({**settings, "group": "tcp://127.0.0.1:7000"})


def test_ranks_of_different_models_are_told_apart() -> None:
    members = Membership(["a", "b"], 5.0, tensor_parallel=True)
    members.receive("a", Hello("a", 1, 2, (0, 4), ""), 0.0)
    with pytest.raises(ProtocolError, match=r"V1 has slices of layers \[0, 4\), but V2 of \[0, 5\)"):
        members.receive("b", Hello("b", 2, 2, (0, 5), ""), 0.0)


# ---- virtual time ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [1, 2, 4, 7])
def test_virtual_groups_give_the_tokens_of_plain_decoding(model: Path, plain: PlainDecoder, devices: int,
                                                          kind: Parallelism) -> None:
    cluster = VirtualCluster(model, devices, PROFILE)
    for sampling in SAMPLINGS:
        result = cluster.generate(Request(PROMPT, kind, 16, sampling, Params(tree_size=22)))
        assert result.tokens == plain.generate(PROMPT, 16, sampling)[0]


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
