"""Faults beside requests: of the power meter, a callback, a silent stage, overflows.  What a strategy raises is in
test_cores.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.process_clusters import PATIENCE, PROMPT
from kits.requests import own_text
from kits.tiny_model_dir import tiny_model_dir
from safetensors.torch import load_file, save_file

from flowspec_edge.d0.request import Request, RequestHandle
from flowspec_edge.drivers.observe.power import PowerMeter
from flowspec_edge.drivers.processes import subprocesses
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import PeerLost, RequestFailed

REQUESTS = [Request(PROMPT[: 30 + n], "flowspec", max_new_tokens=12) for n in range(3)]


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(ClusterSpec(model, 2, threads=1)).start() as made:
        yield made


@pytest.mark.parametrize("where", ["joules_at", "read"])
def test_a_fault_of_the_power_meter_costs_the_figures_alone(
        cluster: ProcessCluster, model: Path, where: str, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    def broken(meter: PowerMeter, *arguments: object) -> float:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(PowerMeter, where, broken)
    assert cluster.running is not None
    monkeypatch.setattr(cluster.running.energy, "_meter", PowerMeter((), 1.0))
    results = cluster.generate_many(REQUESTS)
    assert [result.tokens for result in results] == [own_text(model, request) for request in REQUESTS]
    assert {result.stats.energy_j for result in results} == {None}
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_each_request_has_its_own_exception(cluster: ProcessCluster) -> None:
    """Several threads raise them; an exception object has one traceback."""
    def interrupt(new: list[int]) -> None:
        raise KeyboardInterrupt

    handles = [cluster.submit(REQUESTS[0], interrupt), *map(cluster.submit, REQUESTS)]
    with pytest.raises(KeyboardInterrupt) as caught:
        cluster.serve(lambda: False)
    errors = [handle.exception() for handle in handles]
    assert {type(error) for error in errors} == {KeyboardInterrupt}
    assert len({id(error) for error in [*errors, caught.value]}) == 5


def test_a_silent_stage_is_noticed_while_requests_begin(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that begins while no other runs does not make the stages' silence start again."""
    monkeypatch.setattr(subprocesses, "_STOPPED_S", PATIENCE)  # else its state is noticed first
    with ProcessCluster(ClusterSpec(model, 2, threads=1, dead_after=4.0)).start() as cluster:
        os.kill(cluster.pids[1], signal.SIGSTOP)

        handles: list[RequestHandle] = []
        deadline = time.monotonic() + PATIENCE

        def ask() -> bool:
            if cluster.busy:  # it has begun
                handles[-1].cancel()
            else:
                handles.append(cluster.submit(REQUESTS[0]))
            return time.monotonic() > deadline

        with pytest.raises(PeerLost, match="V2 has been silent for 4 s"):
            cluster.serve(ask)


LARGE = 299  # a token whose states grow beyond fp16 in the layers; no text of the model has it
AT = 67  # its place in the prompt, in the second chunk, which begins at 64: the rows before it do not see it


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2)
    file = path / "target/model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][LARGE] = 65_500.0
    weights["model.layers.0.mlp.down_proj.weight"] *= 100
    weights["lm_head.weight"][LARGE] = 0.0
    save_file(weights, file, {"format": "pt"})
    return path


@pytest.mark.slow
def test_activations_that_overflow_fp16_end_their_own_request_alone(overflowing: Path) -> None:
    spoiled = [*PROMPT[:AT], LARGE, *PROMPT[AT:]]
    other = Request(PROMPT, "autoregressive", max_new_tokens=12)  # its rows are always computed alone
    with ProcessCluster(ClusterSpec(overflowing, 2, "fp16", threads=1)).start() as cluster:
        alone = cluster.generate(other).tokens
        requests = [other, Request(spoiled, "flowspec", max_new_tokens=12), other]
        handles = [cluster.submit(request) for request in requests]
        cluster.serve(lambda: all(handle.done() for handle in handles))
        with pytest.raises(RequestFailed, match="from position 67 on: activations overflow float16"):
            handles[1].result()
        assert [handles[n].result().tokens for n in (0, 2)] == [alone, alone]
        assert len(cluster.generate(Request(PROMPT, "flowspec", max_new_tokens=12)).tokens) == 12
