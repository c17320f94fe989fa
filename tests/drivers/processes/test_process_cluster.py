"""The cluster as it really runs: processes, sockets, signals.

Tokens are compared with transformers' own decoding of the unsharded model; processes are killed and
stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from kits.cases import strategies
from kits.process_clusters import PATIENCE, PROMPT, alive, on_third
from kits.services import free_port, own_address
from kits.tiny_model_dir import tiny_model_dir
from transformers import AutoModelForCausalLM

from flowspec_edge.d0.lm_head import LmHead
from flowspec_edge.d0.request import Request, RequestHandle
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.forkserver import WorkerProcess
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec, Connected
from flowspec_edge.drivers.ring import Addresses
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.errors import FlowspecError, PeerLost
from flowspec_edge.strategies.registry import STRATEGIES
from flowspec_edge.util import threads

PIPELINED = [name for name, cls in STRATEGIES.items() if cls.parallelism == "pipeline"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(ClusterSpec(model, 3, threads=1)).start() as made:
        yield made


@cache
def greedy(model: Path, count: int) -> list[int]:
    """transformers' own generate."""
    whole = AutoModelForCausalLM.from_pretrained(model / "target", dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    out = whole.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                         eos_token_id=None, pad_token_id=0)
    return [int(token) for token in out[0, len(PROMPT):]]


@pytest.mark.parametrize("strategy", strategies(*PIPELINED))
def test_greedy_text_is_that_of_transformers(cluster: ProcessCluster, model: Path, strategy: str) -> None:
    streamed: list[int] = []
    result = cluster.generate(Request(PROMPT, strategy, max_new_tokens=20), streamed.extend)
    assert result.tokens == greedy(model, 20) == streamed
    assert result.finish_reason == "length"


def test_the_stages_last_counters_are_in_the_result(cluster: ProcessCluster) -> None:
    stats = cluster.generate(Request(PROMPT, "chunk_pp", max_new_tokens=6)).stats
    assert len(stats.stages) == 3
    for before, after in zip(stats.stages, stats.stages[1:], strict=False):
        assert after["bytes_in"] == before["bytes_out"] > 0
    assert all(stage["rows"] >= len(PROMPT) and stage["compute_s"] > 0 for stage in stats.stages)
    assert stats.slot_s > 0
    assert stats.bytes > sum(stage["bytes_out"] for stage in stats.stages)
    assert stats.decode_s > 0
    assert stats.ttft_s > 0
    assert stats.turns == pytest.approx(stats.decode_s / stats.slot_s)


def refuse_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_one_request_without_memory_on_d0_leaves_the_cluster_up(cluster: ProcessCluster, model: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr(LmHead, "logits", refuse_memory)
        with pytest.raises(FlowspecError, match=r"^cpu is out of memory \(CUDA out of memory\)"):
            cluster.generate(Request(PROMPT, max_new_tokens=5))
    assert cluster.generate(Request(PROMPT, max_new_tokens=5)).tokens == greedy(model, 5)


def test_an_interrupted_request_leaves_the_cluster_up(cluster: ProcessCluster, model: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.generate(Request(PROMPT, "flowspec", max_new_tokens=200), on_third(interrupt))
    assert cluster.generate(Request(PROMPT, "flowspec", max_new_tokens=5)).tokens == greedy(model, 5)


@pytest.mark.parametrize(("named", "large", "expected"), [
    ("", False, 1), ("", True, max(1, len(os.sched_getaffinity(0)) // 2)), ("5", True, 7)])
def test_d0_takes_its_share_of_threads(model: Path, monkeypatch: pytest.MonkeyPatch, named: str, large: bool,
                                       expected: int) -> None:
    """Of a small model it is one; torch's own number stays if the user has chosen."""
    monkeypatch.setenv("OMP_NUM_THREADS", named)
    if large:
        monkeypatch.setattr(threads, "_SMALL", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        with ProcessCluster(ClusterSpec(model, 1)).start():
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)


def test_a_cluster_ends_cleanly(model: Path) -> None:
    cluster = ProcessCluster(ClusterSpec(model, 2, threads=1)).start()
    pids = cluster.pids
    try:
        assert cluster.generate(Request(PROMPT, "flowspec", max_new_tokens=8)).tokens == greedy(model, 8)
    finally:
        cluster.close()
    cluster.close()
    assert not any(map(alive, pids))
    with pytest.raises(FlowspecError, match="the cluster is closed"):
        cluster.generate(Request(PROMPT))


@pytest.mark.parametrize(("number", "dead_after", "text"), [
    (signal.SIGKILL, PATIENCE, "V2 was killed by SIGKILL"),
    (signal.SIGSTOP, PATIENCE, "V2 was stopped"),
    pytest.param(signal.SIGTERM, PATIENCE, "V2 ended with exit code 0", marks=pytest.mark.soak),
])
def test_a_lost_stage_is_named_and_the_others_are_reaped(model: Path, number: signal.Signals,
                                                         dead_after: float, text: str) -> None:
    with ProcessCluster(ClusterSpec(model, 2, threads=1, dead_after=dead_after)).start() as cluster:
        pids = cluster.pids
        with pytest.raises(PeerLost, match=text):
            cluster.generate(Request(PROMPT, "flowspec", max_new_tokens=1000),
                             on_third(lambda: os.kill(pids[1], number)))
        assert not any(map(alive, pids))


def test_what_is_submitted_when_the_stages_are_lost_ends_too(model: Path) -> None:
    """By a callback of the request that the loss ends; the next request starts other stages."""
    with ProcessCluster(ClusterSpec(model, 1, threads=1)).start() as cluster:
        late: list[RequestHandle] = []
        request = Request(PROMPT, "autoregressive", 30)
        first = cluster.submit(request, on_third(lambda: os.kill(cluster.pids[0], signal.SIGKILL)))
        first.add_done_callback(lambda handle: late.append(cluster.submit(request)))
        with pytest.raises(PeerLost):
            cluster.serve(first.done)
        with pytest.raises(PeerLost):
            late[0].result(0)
        assert cluster.generate(request).tokens == greedy(model, 30)


def test_a_truncated_shard_is_told_by_the_stage_that_reads_it(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    whole = AutoModelForCausalLM.from_pretrained(model / "target", dtype=torch.float32)
    (broken / "target" / "model.safetensors").unlink()
    whole.save_pretrained(broken / "target", max_shard_size="40KB")
    index = json.loads((broken / "target" / "model.safetensors.index.json").read_text())["weight_map"]
    others = {file for tensor, file in index.items() if not tensor.startswith("model.layers.1.")}
    name = next(file for file in index.values() if file not in others)  # only V2 reads it
    file = broken / "target" / name
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(FlowspecError, match=name) as caught:
        ProcessCluster(ClusterSpec(broken, 3, threads=1)).start()
    assert str(caught.value).startswith("V2 ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_table_that_changes_in_use_is_told_by_v1(model: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    with ProcessCluster(ClusterSpec(broken, 2, threads=1)).start() as cluster:
        # the second if the file is cut between V1's look at its size and the read
        told = r"model\.safetensors (has changed|was cut short) while its embeddings were in use"
        with pytest.raises(FlowspecError, match=told) as caught:
            cluster.generate(Request(PROMPT, "flowspec", max_new_tokens=1000),
                             on_third(lambda: os.truncate(broken / "target" / "model.safetensors", 1000)))
        assert str(caught.value).startswith("V1")
        assert len(str(caught.value).splitlines()) == 1


def free_addresses() -> list[str]:
    """Of D0's control, a stage's data, and its output."""
    host = own_address()
    return [f"tcp://{host}:{free_port(host)}" for _ in range(3)]


@pytest.mark.slow
def test_stages_elsewhere_serve_one_d0_after_another(model: Path, tmp_path: Path) -> None:
    control, data, output = free_addresses()
    config = WorkerConfig(instance="board-1", stage=1, stages=1, model=str(model / "target"), threads=1,
                          control=control, listen=data, next=output, lost_after_s=PATIENCE)
    file = tmp_path / "worker.toml"
    file.write_text(config.dump())
    command = [sys.executable, "-m", "flowspec_edge.drivers.stage", "--config", str(file)]
    with subprocess.Popen(command) as worker:
        for _ in range(2):
            with ProcessCluster(ClusterSpec(model, 1),
                                Connected(Addresses(control, output, data, ["board-1"]))).start() as cluster:
                assert cluster.pids == []
                result = cluster.generate(Request(PROMPT, "autoregressive", max_new_tokens=4))
                assert result.tokens == greedy(model, 4)
            assert worker.poll() is None
        worker.terminate()
        assert worker.wait(PATIENCE) == 0


class OneBoard:
    """``BoardStages``: a stage that is started for the first request."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model, self._directory = model, directory
        self.calls: list[str] = []
        self.worker: WorkerProcess | None = None

    def connect(self) -> Connected:
        self.calls.append("connect")
        control, data, output = free_addresses()
        file = self._directory / "worker.toml"
        file.write_text(WorkerConfig(instance="board-1", stage=1, stages=1, model=str(self._model / "target"),
                                     threads=1, control=control, listen=data, next=output).dump())
        self.worker = WorkerProcess(file, self._directory / "output")
        return Connected(Addresses(control, output, data, ["board-1"]))

    def refresh(self) -> None:
        self.calls.append("refresh")

    def disconnect(self) -> None:
        if self.worker is not None:
            self.worker.terminate()
            assert self.worker.wait(PATIENCE) == 0
            self.worker = None


def test_boards_are_connected_once_and_refreshed(model: Path, tmp_path: Path) -> None:
    board = OneBoard(model, tmp_path)
    with open_cluster(ClusterSpec(model, 1), board) as cluster:
        assert board.calls == []
        for count in (4, 2):
            result = cluster.generate(Request(PROMPT, "autoregressive", max_new_tokens=count))
            assert result.tokens == greedy(model, count)
        assert board.calls == ["refresh", "connect", "refresh"]
        assert board.worker is not None
    assert board.worker is None
