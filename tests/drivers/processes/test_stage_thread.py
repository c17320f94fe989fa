"""The only stage as a thread of D0's process: its tokens, losses, errors, and that nothing of it stays."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.process_clusters import PROMPT, on_third
from kits.tiny_model_dir import tiny_model_dir
from safetensors.torch import load_file, save_file

from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.processes import stage_thread, subprocesses
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.errors import PeerLost
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling

NEW = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture(autouse=True)
def also_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = threading.enumerate()
    monkeypatch.setattr(subprocesses, "shares_a_process", lambda configs: len(configs) == 1)
    yield
    assert threading.enumerate() == before


def stages() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("V")]


def test_only_a_single_stage_on_a_gpu_shares_d0s_process() -> None:
    def configs(count: int, device: str) -> list[WorkerConfig]:
        return [WorkerConfig.model_construct(stage=i + 1, device=device) for i in range(count)]

    assert stage_thread.shares_a_process(configs(1, "cuda:0"))
    assert not stage_thread.shares_a_process(configs(2, "cuda:0"))
    assert not stage_thread.shares_a_process(configs(1, "cpu"))


@pytest.mark.parametrize("strategy", ["autoregressive", "speculative", "flowspec"])
def test_tokens_are_those_of_plain_decoding(model: Path, strategy: str) -> None:
    with ProcessCluster(ClusterSpec(model, 1)).start() as cluster:
        assert cluster.pids == [os.getpid()]
        assert [thread.name for thread in stages()] == ["V1"]
        for sampling in (Sampling(), Sampling(1.0, seed=5)):
            expected = PlainDecoder(model).generate(PROMPT, NEW, sampling)[0]
            assert cluster.generate(Request(PROMPT, strategy, NEW, sampling)).tokens == expected


def test_a_stage_that_ends_is_started_again(model: Path) -> None:
    expected = PlainDecoder(model).generate(PROMPT, NEW, Sampling())[0]
    with ProcessCluster(ClusterSpec(model, 1, rejoin_within=60)).start() as cluster:
        [first] = stages()
        assert cluster.running is not None
        [worker] = cluster.running.workers._workers
        assert cluster.generate(Request(PROMPT, "flowspec", NEW), on_third(worker.kill)).tokens == expected
        [second] = stages()
        assert second is not first
        assert not first.is_alive()


def test_without_a_restart_the_loss_is_said(model: Path) -> None:
    with ProcessCluster(ClusterSpec(model, 1)).start() as cluster:
        assert cluster.running is not None
        [worker] = cluster.running.workers._workers
        with pytest.raises(PeerLost, match="V1 ended with exit code 0"):
            cluster.generate(Request(PROMPT, "flowspec", NEW), on_third(worker.kill))


def test_a_damaged_shard_is_one_line(model: Path, tmp_path: Path) -> None:
    broken = tiny_model_dir(tmp_path / "broken", layers=3)
    file = broken / "target" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(PeerLost, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight") as caught:
        ProcessCluster(ClusterSpec(broken, 1)).start()
    assert "\n" not in str(caught.value)
