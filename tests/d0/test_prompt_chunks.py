"""How many tokens of a prompt a segment carries."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.planned_boards import board, problem, profile, size
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.boards.planning.planner import plan
from flowspec_edge.boards.planning.testbed import profile_or_testbed
from flowspec_edge.d0.prompt_chunks import MOST, STEP, USUAL, PromptCurve
from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.lab.first_token import in_virtual_time, request_of
from flowspec_edge.strategies.params import Params

TESTBEDS = ("orin-nano-8gb-super:5/qwen3-32b/int4", "orin-nano-8gb:5/llama-2-7b/fp16",
            "orin-nano-8gb:5/llama-2-13b/int4", "orin-nx-16gb:4/qwen3-14b/int4")


@pytest.mark.parametrize("name", TESTBEDS)
@pytest.mark.parametrize("tokens", [40, 512, 1500])
def test_no_other_size_of_segments_has_the_first_token_sooner(name: str, tokens: int) -> None:
    """Within 2 %: the choice is by a formula, the time by simulation."""
    described = profile_or_testbed(name)
    devices = Devices.from_profile(described, int(name.partition("/")[0].partition(":")[2]) - 1)
    chosen = in_virtual_time(devices, tokens).seconds
    assert chosen is not None
    others = [in_virtual_time(devices, tokens, Params(prefill_chunk=rows)).seconds for rows in range(16, MOST + 1, 16)]
    assert chosen <= 1.02 * min(seconds for seconds in others if seconds is not None)


def test_the_choice_has_its_reasons() -> None:
    flat, steep = PromptCurve(lambda rows, context: 1.0), PromptCurve(lambda rows, context: rows / 16)
    assert flat.chunk(4096, 4) == MOST
    assert PromptCurve(flat.seconds, most=200).chunk(4096, 4) == 192
    assert flat.chunk(100, 4) == 112  # all at once
    assert steep.chunk(4096, 4) == STEP  # fills the pipeline soonest
    read = PromptCurve(lambda rows, context: rows / 16 + context / 100)
    assert read.chunk(4096, 4) > STEP  # reads the cache less often
    assert read.chunk(64, 4, cached=100_000) == 64


def test_rows_follow_from_the_memory_that_is_left() -> None:
    """On the board with the least of it; a process's memory includes the usual rows."""
    of = size(layers=8, kv_row=0)
    wide = problem(of)
    row = 2 * wide.cached  # bytes: this model has no matrices, so a row has its mask alone
    room = wide.stage(4)
    for spare, rows in ((0, USUAL), (100 * row, USUAL + 96), (10_000 * row, MOST)):
        boards = [board("d0", role="draft"), board("a", role="verify"),
                  board("b", role="verify", usable_mb=500 + (room + spare) / 1e6)]
        found = plan(boards, wide)
        layers = {stage.board.name: stage.layers for stage in found.stages}
        assert {hi - lo for lo, hi in layers.values()} == {4}
        assert found.predicted_prompt_rows == rows


def test_strategies_and_settings_cut_prompts_alike() -> None:
    devices = Devices.from_profile(profile(), 3)
    rows = PromptCurve(devices.prompt_seconds).chunk(300, 3)
    assert in_virtual_time(devices, 300) == in_virtual_time(devices, 300, Params(prefill_chunk=rows))
    assert in_virtual_time(devices, 300) != in_virtual_time(devices, 300, Params(prefill_chunk=rows + 64))
    assert request_of(300).params.prefill_chunk == 0


def test_a_result_says_how_its_prompt_was_cut(tmp_path: Path) -> None:
    """A stage counts as many segments as follow from what the result says."""
    with VirtualCluster(tiny_model_dir(tmp_path / "model", layers=4, hidden=32), 2, profile(layers=4)) as cluster:
        for chunk in (0, 48):
            request = Request([1] * 200, "autoregressive", 1, params=Params(prefill_chunk=chunk))
            found = cluster.generate(request).stats
            assert [stage["segments"] for stage in found.stages] == [-(-200 // found.prompt_chunk)] * 2
            assert chunk in (0, found.prompt_chunk)
