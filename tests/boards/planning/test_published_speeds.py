"""Plain decoding on one board: what the planner predicts beside what others have published, and testbeds."""

from __future__ import annotations

from types import ModuleType

import pytest
from kits import documents

from flowspec_edge.boards.planning import planner
from flowspec_edge.boards.planning.board_spec import parse_devices
from flowspec_edge.boards.planning.layer_split import problem_for
from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.boards.planning.one_board import smallest_board
from flowspec_edge.boards.planning.scaling import at_context
from flowspec_edge.boards.planning.testbed import CONTEXT, profile_or_testbed
from flowspec_edge.device_profile import load_profile, read_profile
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.errors import FlowspecError, UsageError

ROWS = 16


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return documents.builder("build_one_board")


def test_the_document_has_the_table_as_it_is_computed(build: ModuleType) -> None:
    text = (documents.DOCS / "experiments" / "planning.md").read_text(encoding="utf-8")
    assert build.written(text) == text, "renew it with: python docs/build_one_board.py"


def test_compiled_engines_are_within_a_quarter(build: ModuleType) -> None:
    """llama.cpp reaches half of the bandwidth that the others reach; the document says so."""
    ratios = {row: build.predicted(row) / row.tokens_per_second for row in build.ROWS}
    within = [row for row, ratio in ratios.items() if 0.75 <= ratio <= 1.25]
    assert len(within) >= 8
    assert {row.engine for row in ratios if row not in within} == {build.LLAMA_CPP}


@pytest.mark.parametrize("name", ["orin-nano-8gb", "orin-nano-8gb-super", "orin-nx-16gb", "agx-orin-64gb",
                                  "thor-t5000"])
def test_profiles_charge_bytes_at_their_bandwidth(name: str) -> None:
    profile = load_profile(name)
    memory = profile.memory
    assert memory
    assert memory.gb_per_s
    assert memory.gb_per_s_range
    low, high = memory.gb_per_s_range
    assert low < memory.gb_per_s < high
    assert str(high) in profile.source or f"{high:g}" in profile.source
    assert profile.model.layer_mb
    layer = profile.model.layer_mb / memory.gb_per_s / 1e3
    assert profile.stage_seconds(1, 1) == pytest.approx(layer, rel=0.01)
    assert profile.lm_head.ms == pytest.approx(32_000 * 4096 * 2 / 1e6 / memory.gb_per_s, rel=0.01)


def test_the_smallest_board_is_the_first_that_holds_everything() -> None:
    def smallest(model: str) -> str | None:
        found = smallest_board(problem_for(model_bytes(model, "int4"), 2048, 1, 1))
        return found.profile if found else None

    assert smallest("qwen2-7b") == "orin-nano-8gb-super"  # with as much memory as the slower one
    assert smallest("qwen3-14b") == "orin-nx-16gb"
    assert smallest("qwen3-32b") == "agx-orin-64gb"


@pytest.mark.parametrize(("board", "count", "model", "dtype"), [
    ("orin-nano-8gb-super", 5, "qwen3-32b", "int4"), ("orin-nx-16gb", 3, "qwen3-14b", "int4"),
    ("agx-orin-64gb", 2, "llama-2-7b", "fp16")])
def test_a_testbed_has_the_times_of_the_plan(board: str, count: int, model: str, dtype: str) -> None:
    profile = profile_or_testbed(f"{board}:{count}/{model}/{dtype}")
    size = model_bytes(model, dtype)  # type: ignore[arg-type]
    boards = [member.for_model(size)[0] for member in parse_devices([f"{board}:{count}"])]
    problem = problem_for(size, CONTEXT, 1, count)
    plan = planner.plan(boards, problem)
    devices = Devices.from_profile(profile, count - 1)
    slowest = max(devices.stage_seconds(place, ROWS, CONTEXT) for place in range(1, count))
    layers = max(hi - lo for lo, hi in (stage.layers for stage in plan.stages))
    assert slowest == pytest.approx(plan.slowest * (size.layers / (count - 1)) / layers, rel=1e-6)
    planned = at_context(plan.d0.profile, size, 0)
    assert profile.draft_seconds("eagle2", 10) == pytest.approx(planned.draft_seconds("eagle2", 10))
    assert profile.verify_seconds(ROWS) == pytest.approx(planned.verify_seconds(ROWS))
    assert (profile.kind, profile.boards, profile.model.layers) == ("testbed", count, size.layers)


def test_boards_of_several_kinds_are_the_planners_devices() -> None:
    name = "agx-orin-64gb:1,orin-nano-8gb-super:2,orin-nano-8gb-super:1/qwen3-8b/int4"
    profile = profile_or_testbed(name)
    size = model_bytes("qwen3-8b", "int4")
    members = parse_devices(["agx-orin-64gb", "orin-nano-8gb-super:3"])
    boards = [member.for_model(size)[0] for member in members]
    plan = planner.plan(boards, problem_for(size, CONTEXT, 1, len(boards)))
    devices = Devices.from_profile(profile, 3)  # stages follow from the boards
    assert devices.stages == tuple(stage.board.profile for stage in plan.stages)
    assert devices.layers == tuple(hi - lo for lo, hi in (stage.layers for stage in plan.stages))
    assert len(set(devices.layers)) > 1  # an AGX computes more of them
    assert devices.d0.verify_seconds(ROWS) == plan.d0.profile.verify_seconds(ROWS)
    slowest = max(devices.stage_seconds(place, ROWS, CONTEXT) for place in (1, 2, 3))
    assert slowest == pytest.approx(plan.slowest)
    with pytest.raises(UsageError, match="has 4 boards, one of which drafts: use --stages 3, or leave"):
        Devices.from_profile(profile, 4)
    assert read_profile(profile.model_dump_json()) == profile  # --jobs
    slow = Devices.from_profile(profile.with_link(mbps=10), 3)
    assert {board.link.mbps for board in (slow.d0, *slow.stages)} == {10}


def test_boards_of_one_kind_are_the_same_however_they_are_written() -> None:
    together, apart = map(profile_or_testbed, (f"orin-nano-8gb:{count}/qwen3-8b/int4" for count in
                                               ("4", "1,orin-nano-8gb:3")))
    assert apart.model_copy(update={"name": together.name}) == together


@pytest.mark.parametrize(("name", "message"), [
    ("orin-nano-8gb-super:4/qwen3-32b/int4", "needs .* MB: 64 layers .* What would help: 1 more like"),
    ("orin-nano-8gb-super:5/qwen3-32b/int3", "no element type 'int3'; there are: fp32, bf16, fp16, int4"),
    ("nano:5/qwen3-32b/int4", "no profile 'nano'"),
    ("orin-nano-8gb:5/nothing-1b/int4", "no model 'nothing-1b'"),
    ("orin-nano-8gb:0/qwen3-32b/int4", "needs a number of boards of at least 1, not 0"),
    ("orin-nano-8gb:1/qwen2-7b/int4", "2 to 64 boards are needed, one of which drafts, not 1"),
    ("agx-orin-64gb,orin-nano-8gb:2/qwen3-8b/int4", "a testbed is BOARD:N"),
    ("agx-orin-64gb:1,nano:2/qwen3-8b/int4", "no profile 'nano'"),
    ("agx-orin-64gb:1,orin-nano-8gb:1/qwen3-32b/fp16", "needs .* MB"),
    ("orin-nano-8gb:5/qwen3-32b", "a testbed is BOARD:N"),
])
def test_wrong_testbeds_are_one_line(name: str, message: str) -> None:
    with pytest.raises(FlowspecError, match=message) as caught:
        profile_or_testbed(name)
    assert "\n" not in str(caught.value)
