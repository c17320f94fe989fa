"""The time to the first token by the length of the prompt."""

from __future__ import annotations

import json

import pytest
from kits.planned_boards import profile

from flowspec_edge.cli.common.workload import shipped_recording
from flowspec_edge.cli.main import main
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.drivers.virtual.recorded import request_of
from flowspec_edge.drivers.virtual.recording import load_recording
from flowspec_edge.lab.first_token import in_virtual_time
from flowspec_edge.model.opened import DEMO
from flowspec_edge.strategies.params import Params

STRATEGIES = ("flowspec_plus", "flowspec", "chunk_pp", "pruned_pp", "pipedec", "speculative", "autoregressive")


def boards(stages: int, context_ms: float = 0.0) -> Devices:
    board = profile(latency_ms=0.0, mbps=1e9)
    curve = board.stage.model_copy(update={"context_ms": [context_ms] * len(board.stage.rows)})
    return Devices.from_profile(board.model_copy(update={"stage": curve}), stages)


@pytest.mark.parametrize(("tokens", "chunk"), [(64, 64), (100, 64), (512, 32), (512, 200), (1, 64), (1000, 7)])
@pytest.mark.parametrize("context_ms", [0.0, 40.0])
def test_prompts_take_the_time_of_a_flow_shop(tokens: int, chunk: int, context_ms: float) -> None:
    """A chunk begins in a stage when the stage has finished the chunk before, and the stage before it this one."""
    devices = boards(4, context_ms)
    ends = [0.0] * 4
    for start in range(0, tokens, chunk):
        rows, before = min(chunk, tokens - start), 0.0
        for stage in range(4):
            took = (max(6.0, 6.0 * rows / 64) + context_ms * start / 1000) * 8 * 1e-3
            before = ends[stage] = max(before, ends[stage]) + took
    found = in_virtual_time(devices, tokens, Params(prefill_chunk=chunk))
    assert found.seconds == pytest.approx(ends[-1] + 4e-3, rel=1e-6)  # and lm_head
    assert (found.prompt_tokens, found.why) == (tokens, "")


def test_all_strategies_have_one_time_to_the_first_token() -> None:
    """So its length follows from plain decoding alone: every strategy cuts a prompt into the same chunks."""
    recording = load_recording(shipped_recording(DEMO))
    devices = boards(4)
    request = request_of(recording.at(0.0)[0], recording, 8, params=Params(draft=recording.draft))
    times = set()
    for name in STRATEGIES:
        with VirtualCluster(recording, 4, devices) as cluster:
            times.add(cluster.generate(type(request)(**{**vars(request), "strategy": name})).stats.ttft_s)
    assert times == {in_virtual_time(devices, len(request.prompt)).seconds}


def test_bench_prints_it_on_both_clocks(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    given = ["bench", "run", "--strategies", "autoregressive", "--limit", "1", "--max-new-tokens", "2"]
    out = f"{tmp_path}/out.json"
    assert main([*given, "--profile", "paper-7b", "--prompt-lengths", "64,640", "--json", out]) == 0
    assert "time to the first token of a prompt alone, VIRTUAL TIME" in capsys.readouterr().out
    with open(out, encoding="utf-8") as file:
        short, long = json.load(file)["first_tokens"]
    assert short["prompt_tokens"] == 64
    assert 0 < short["seconds"] < long["seconds"]
    assert main([*given, "--clock", "wall", "--stages", "1", "--prompt-lengths", "64,100000", "--json", out]) == 0
    with open(out, encoding="utf-8") as file:
        short, long = json.load(file)["first_tokens"]
    assert short["seconds"] > 0
    assert long["seconds"] is None
    assert "the model stops at" in long["why"]
    assert main([*given, "--prompt-lengths", "0"]) == 2
