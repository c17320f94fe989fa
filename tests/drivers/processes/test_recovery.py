"""A stage is lost while requests run: it is named and restarted, and the answers are complete.

Processes are really killed, stopped and cut off; tokens are compared with plain decoding of the unsharded
model.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.lost_stages import Striker
from kits.process_clusters import PATIENCE, PROMPT, alive, on_third
from kits.requests import own_text, text
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.d0.request import ClusterState, Request
from flowspec_edge.drivers.processes import forkserver
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import PeerLost
from flowspec_edge.sampling.rule import Sampling

TWO = [Request(PROMPT, "flowspec", 40),
       Request(PROMPT[:20], "flowspec", 30, Sampling(temperature=1.0, top_p=0.9, seed=5))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture(scope="module")
def striker() -> Striker:
    return Striker()


@pytest.fixture(scope="module")
def cluster(model: Path, striker: Striker) -> Iterator[ProcessCluster]:
    # Twice, since a new fork server imports for long.
    with ProcessCluster(ClusterSpec(model, 3, threads=1, rejoin_within=2 * PATIENCE,
                                    observer=striker)).start() as made:
        yield made


@pytest.mark.parametrize(("stage", "number", "said"), [
    (2, signal.SIGKILL, "V2 was killed by SIGKILL"),
    (3, signal.SIGSTOP, "V3 was stopped, and did not go on"),
])
def test_two_answers_go_on_after_a_stage_was_lost(
        cluster: ProcessCluster, model: Path, striker: Striker, stage: int, number: signal.Signals,
        said: str) -> None:
    striker.losses.clear()
    striker.missed.clear()
    before, back = cluster.pids, striker.times_back
    streamed: list[list[int]] = [[], []]

    def third(new: list[int]) -> None:
        streamed[0].extend(new)
        act(new)

    act = on_third(lambda: os.kill(before[stage - 1], number))
    handles = [cluster.submit(TWO[0], third), cluster.submit(TWO[1], streamed[1].extend)]
    cluster.serve(lambda: all(handle.done() for handle in handles))
    results = [handle.result() for handle in handles]
    assert [result.tokens for result in results] == [own_text(model, request) for request in TWO] == streamed
    assert [reason[:len(said)] for reason in striker.losses] == [said]
    assert striker.times_back == back + 1
    assert striker.missed[0] == [stage]
    assert striker.missed[-1] == []
    assert cluster.status.state is ClusterState.RUNNING
    after = cluster.pids
    assert [i + 1 for i in range(3) if before[i] != after[i]] == [stage]  # the others stayed up
    assert not alive(before[stage - 1])
    for result in results:
        assert result.stats.ttft_s > 0
        assert result.stats.accepted <= len(result.tokens)
        assert result.stats.bytes > sum(stage["bytes_out"] for stage in result.stats.stages)


def test_a_second_loss_and_a_cancelled_request(
        cluster: ProcessCluster, model: Path, striker: Striker) -> None:
    before = cluster.pids
    stays = cluster.submit(TWO[0], on_third(lambda: os.kill(before[0], signal.SIGKILL)))
    goes = cluster.submit(Request(TWO[1].prompt, "chunk_pp", 1000, TWO[1].sampling))
    resumed: list[int] = []

    def lost() -> None:
        goes.cancel()
        os.kill(before[2], signal.SIGKILL)
        striker.on_opened = lambda event: resumed.append(len(event.request.prompt))

    striker.on_lost = lost
    cluster.serve(lambda: stays.done() and goes.done())
    striker.on_opened = lambda event: None
    assert stays.result().tokens == own_text(model, TWO[0])
    assert set(resumed) == {len(TWO[0].prompt)}
    left = goes.result()
    assert left.finish_reason == "cancelled"
    assert left.tokens == text(model, tuple(TWO[1].prompt), 200, TWO[1].sampling)[: len(left.tokens)]
    assert len(left.tokens) < 200
    assert [i + 1 for i in range(3) if before[i] == cluster.pids[i]] == [2]


def test_a_stage_that_does_not_come_back_is_named(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)

    def strike() -> None:
        shutil.rmtree(copy / "target")
        os.kill(pids[1], signal.SIGKILL)

    with ProcessCluster(ClusterSpec(copy, 2, threads=1, rejoin_within=5.0)).start() as cluster:
        pids = cluster.pids
        begun = cluster.submit(Request(PROMPT, "flowspec", 1000), on_third(strike))
        why = r"V2 was killed by SIGKILL; not back within 5 s: V2 .*has no config\.json"
        with pytest.raises(PeerLost, match=why):
            cluster.serve(begun.done)
        with pytest.raises(PeerLost, match="not back within 5 s: V2"):
            begun.result(0)
        assert cluster.running is None
        assert not any(map(alive, pids))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_fork_server_is_replaced_and_its_workers_go_on(
        cluster: ProcessCluster, model: Path, monkeypatch: pytest.MonkeyPatch,
        number: signal.Signals) -> None:
    monkeypatch.setattr(forkserver, "_tended_at", -math.inf)
    before, server = cluster.pids, forkserver.server_pid()
    assert server is not None

    def strike() -> None:
        os.kill(server, number)
        os.kill(before[1], signal.SIGKILL)

    assert cluster.generate(TWO[0], on_third(strike)).tokens == own_text(model, TWO[0])
    assert forkserver.server_pid() != server
    assert [one == other for one, other in zip(before, cluster.pids, strict=True)] == [True, False, True]
    assert not alive(before[1])


@pytest.mark.soak
def test_a_stage_that_ends_again_and_again_is_given_up(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    with ProcessCluster(ClusterSpec(copy, 2, threads=1, rejoin_within=10 * PATIENCE)).start() as cluster:
        (copy / "target" / "model.safetensors").unlink()
        os.kill(cluster.pids[0], signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"no model at .*; restarted 5 times without success"):
            cluster.generate(Request(PROMPT, "autoregressive", 8))
