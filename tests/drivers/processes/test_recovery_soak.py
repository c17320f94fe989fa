"""Stages are lost at random moments, again and again: every answer is complete and that of plain decoding.

A moment is a number of messages since the requests began, so it may be in the prompt, in the answer or at its
end; which stage is lost when follows from a seed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from kits.lost_stages import Striker
from kits.process_clusters import PATIENCE, alive
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.d0.request import ClusterState, Request
from flowspec_edge.d0.run_events import SessionOpened
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import PeerLost
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.registry import STRATEGIES

PIPELINED = [name for name, cls in STRATEGIES.items() if cls.parallelism == "pipeline"]
LONG = [(11 * i + 5) % 290 for i in range(150)]  # three chunks
SAMPLINGS = (Sampling(), Sampling(1.0, seed=11), Sampling(1.0, top_p=0.9, seed=12))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=4)


@pytest.fixture(scope="module")
def own_text(model: Path) -> Callable[[Request], list[int]]:
    plain = PlainDecoder(model)
    known: dict[tuple[int, int, Sampling], list[int]] = {}

    def text(request: Request) -> list[int]:
        key = len(request.prompt), request.max_new_tokens, request.sampling
        if key not in known:
            known[key] = plain.generate(request.prompt, request.max_new_tokens, request.sampling)[0]
        return known[key]

    return text


def strike_often(cluster: ProcessCluster, striker: Striker, own_text: Callable[[Request], list[int]],
                 names: list[str], losses: int, seed: int) -> set[int]:
    """Run two or three requests at a time until so many stages were killed, or now and then stopped; all
    process ids."""
    chance, pids, struck = random.Random(seed), set(cluster.pids), 0
    while struck < losses:
        requests = [Request(LONG[:chance.choice((12, 70, 150))], chance.choice(names), chance.choice((8, 24)),
                            chance.choice(SAMPLINGS)) for _ in range(chance.choice((2, 3)))]
        stage = chance.randrange(len(cluster.pids))
        number = signal.SIGSTOP if struck % 6 == 5 else signal.SIGKILL
        striker.arm(chance.randint(1, 60), lambda: os.kill(cluster.pids[stage], number))  # noqa: B023
        results = cluster.generate_many(requests)
        for request, result in zip(requests, results, strict=True):
            assert result.tokens == own_text(request), (struck, request.strategy, stage, number)
        struck += not striker.armed
        pids |= set(cluster.pids)
    return pids


@pytest.mark.soak
def test_random_losses(model: Path, own_text: Callable[[Request], list[int]]) -> None:
    striker, losses = Striker(), 30
    with ProcessCluster(ClusterSpec(model, 4, threads=1, dead_after=2.0, rejoin_within=PATIENCE,
                                    observer=striker)).start() as cluster:
        pids = strike_often(cluster, striker, own_text, PIPELINED, 2, seed=1)
        cluster.generate(Request(LONG, "flowspec", 8))  # D0's head keeps a descriptor of its file from here on
        descriptors = len(os.listdir("/proc/self/fd"))
        pids |= strike_often(cluster, striker, own_text, PIPELINED, losses - 2, seed=2)
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert len(striker.losses) >= losses - 2  # what is struck at the very end may count with the next
        assert cluster.status.state is ClusterState.RUNNING
    assert len(pids) >= 4 + losses - 2
    assert not any(map(alive, pids))


@pytest.mark.soak
def test_a_request_that_costs_a_stage_every_time_ends_alone(
        model: Path, own_text: Callable[[Request], list[int]]) -> None:
    striker = Striker()
    with ProcessCluster(ClusterSpec(model, 2, threads=1, rejoin_within=PATIENCE,
                                    observer=striker)).start() as cluster:
        bad = Request(LONG, "flowspec", 8)

        def opened(event: SessionOpened) -> None:
            if event.request is bad:
                os.kill(cluster.pids[1], signal.SIGKILL)

        striker.on_opened = opened
        good = Request(LONG[:70], "flowspec", 8)
        handles = [cluster.submit(bad), cluster.submit(good)]
        cluster.serve(lambda: all(handle.done() for handle in handles))
        with pytest.raises(PeerLost, match="stages were lost 6 times, and this request got no new token"):
            handles[0].result()
        assert handles[1].result().tokens == own_text(good)


@pytest.mark.soak
def test_a_stage_that_ends_again_and_again_is_given_up(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    with ProcessCluster(ClusterSpec(copy, 2, threads=1, rejoin_within=10 * PATIENCE)).start() as cluster:
        (copy / "target" / "model.safetensors").unlink()
        os.kill(cluster.pids[0], signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"no model at .*; restarted 5 times without success"):
            cluster.generate(Request(LONG, "autoregressive", 8))
