"""Stages that are lost again and again for one cause; random losses are in test_everything_soak and in tests/chaos."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from kits.lost_stages import Striker
from kits.process_clusters import PATIENCE
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.d0.request import Request
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
