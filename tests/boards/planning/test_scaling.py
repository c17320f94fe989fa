"""Profiles scaled to another model, boards as the user gives them, and the plan as a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kits.planned_boards import D0_MB, MB, profile, size

from flowspec_edge.boards.planning.board_spec import BoardSpec, parse_devices
from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.boards.planning.plan_table import alone_rows, plan_rows
from flowspec_edge.boards.planning.planner import CandidateBoard, SplitProblem, plan
from flowspec_edge.boards.planning.scaling import Scaling, at_context, scaled
from flowspec_edge.device_profile import CORRELATION, Int4Cost, LaunchCost, StageCurve, load_profile, render
from flowspec_edge.errors import UsageError

CLUSTER = """
[cluster]
name = "desk"

[[device]]
name = "left"
address = "10.0.0.1"
role = "draft"
profile = "mine.toml"

[[device]]
name = "right"
address = "10.0.0.2"
role = "verify"
profile = "paper-7b"
"""


def write_profile(path: Path) -> Path:
    """A profile as a file."""
    path.write_text(render(profile(name="mine")))
    return path


def test_times_scale_with_bytes() -> None:
    measured = profile(layer_ms=8.0, overhead_ms=1.0)
    measured = measured.model_copy(update={"stage": StageCurve(
        layers=2, rows=[16, 64], ms=[16.0, 20.0], context_ms=[1.0, 2.0], overhead_ms=1.0)})
    # Half as large a layer, half as wide; a layer of 400 MB takes 8 ms, so a MB takes 0.02 ms.
    other = size(layers=12, layer_mb=200, embedding_mb=100, draft_mb=250, hidden_width=2048)
    fitted, how = scaled(measured, other)
    assert how.note == "scaled from layers of 400 MB and width 4096 to 200 MB and 2048"
    assert fitted.stage.ms == pytest.approx([8.0, 10.0])
    assert fitted.stage.context_ms == pytest.approx([0.5, 1.0])
    assert fitted.stage.overhead_ms == 1.0
    assert fitted.lm_head.ms == pytest.approx(100 * 0.02)
    assert fitted.draft.pass_ms == pytest.approx((250 + 100) * 0.02)
    assert fitted.draft.spd_pass_ms == pytest.approx((2 * 200 + 100) * 0.02)
    assert (fitted.model.layers, fitted.model.hidden_width) == (12, 2048)
    assert (fitted.link, fitted.memory, fitted.draft.lm_pass_ms) == (measured.link, measured.memory, 30)


def test_every_pass_reads_the_recurrent_states() -> None:
    """40 MB a layer at 20 GB/s, beside 6 ms for the weights, also of a sparse layer; a measured profile has
    it."""
    own = profile()
    memory = own.memory and own.memory.model_copy(update={"gb_per_s": 20.0})
    board = own.model_copy(update={"memory": memory})
    held = replace(size(layers=12, kv_row=0), state_read=40 * MB)
    for of in (held, replace(held, experts=4, expert=100 * MB, experts_per_token=4)):
        curve = scaled(board, of)[0].stage
        assert [curve.milliseconds(rows) for rows in (1, 64)] == pytest.approx([8.0, 8.0])
    assert scaled(board, replace(held, layers=32))[0].stage.milliseconds(1) == pytest.approx(6.0)


def test_experts_cost_what_their_rows_touch() -> None:
    """3 of 6 experts of 60 MB a row beside 40 MB, at 0.02 ms a MB: 3, 4.5, 5.25, 5.625 experts of independent
    rows, 3 of rows that choose the same, and in between by the board's correlation."""
    board = profile(layer_ms=8.0)
    sparse = replace(size(), layer=400 * MB, layers=12, experts=6, expert=60 * MB, experts_per_token=3)
    fitted, how = scaled(board, sparse)
    assert how.note.endswith("to 400 MB and 4096, of which 1 row reads 220 MB")
    own = board.model_copy(update={"stage": board.stage.model_copy(update={"correlation": 0.5})})
    for share, at, on in ((0.0, 0.0, fitted), (CORRELATION, None, fitted), (1.0, 1.0, fitted),
                          (0.5, None, scaled(own, sparse)[0])):
        assert [on.stage_seconds(rows, 1, correlation=at) * 1e3 for rows in (1, 2, 3, 4)] == pytest.approx(
            [0.02 * (40 + 60 * (3 * share + touched * (1 - share)))
             for touched in (3, 4.5, (4.5 + 5.625) / 2, 5.625)])
    assert fitted.model.layer_mb == 400  # in memory


def test_launches_are_those_of_the_planned_model() -> None:
    """A layer of 400 MB takes 8 ms, of 50 MB in int4 1 ms, and its 20 launches 2 ms."""
    measured = profile(layer_ms=8.0).model_copy(update={"launch": LaunchCost(us=100.0)})
    packed = replace(size(layer_mb=400), dtype="int4", layer=50 * MB, layer_launches=20)
    slots = [scaled(measured, of)[0].stage_seconds(16, 8) * 1e3 for of in (size(), packed)]
    assert slots == pytest.approx([64 + 1.8, 16 + 1.8])
    assert {name: model_bytes(name, "fp16").layer_launches for name in ("llama-2-7b", "qwen3-8b")} == {
        "llama-2-7b": 25, "qwen3-8b": 28}


def test_experts_are_launched_by_the_rows_that_touch_them() -> None:
    """Two launches for each of the 3, 5.25 and 6.9375 of 12 experts that 1, 2 and 3 rows touch."""
    measured = profile(layer_ms=8.0).model_copy(update={"launch": LaunchCost(us=1e5)})
    sparse = replace(size(layer_mb=400), expert=30 * MB, experts=12, experts_per_token=3, layer_launches=35)
    fitted = scaled(measured, sparse)[0]
    assert [fitted.stage_seconds(rows, 2) for rows in (1, 2, 3)] == pytest.approx(
        [0.1 * (2 * (35 + 2 * touched) + 18) for touched in (3, 5.25, 6.9375)])


def test_int4_without_kernel_times_is_bandwidth_alone() -> None:
    """A layer of 400 MB takes 8 ms, so its 4-bit weights of 100 MB 2 ms, read once for every 16 rows."""
    packed = replace(size(), dtype="int4", layer=100 * MB)
    fitted, how = scaled(profile(layer_ms=8.0), packed)
    assert how.basis == "bandwidth"
    assert [fitted.stage_seconds(rows, 1) * 1e3 for rows in (1, 16, 32, 64)] == pytest.approx([2, 2, 4, 8])


def test_int4_takes_the_kernels_times_where_the_profile_has_them(tmp_path: Path) -> None:
    """At 16 rows the int4 product takes half the time of the 16-bit one, at 64 twice its time.  Weights with more bits
    than the measured ones take as much longer as they are larger."""
    cost = Int4Cost(rows=[16, 64], ms=[0.5, 2.0], full_ms=[1.0, 1.0])
    board = profile(layer_ms=8.0).model_copy(update={"int4": cost})
    packed = replace(size(), dtype="int4", layer=200 * MB * 17 // 32)  # in groups of 128
    fitted, how = scaled(board, packed)
    assert how.basis == "kernel"
    assert [fitted.stage_seconds(rows, 1) * 1e3 for rows in (1, 16, 40, 64)] == pytest.approx([4, 4, 10, 16])
    half = replace(packed, layer=packed.layer // 2)  # a model with layers half as large
    assert scaled(board, half)[0].stage_seconds(16, 1) == pytest.approx(2e-3)
    finer = replace(packed, layer=200 * MB * 20 // 32)  # in groups of 32
    assert scaled(board, finer)[0].stage_seconds(16, 1) == pytest.approx(4e-3 * 20 / 17)
    (tmp_path / "board.toml").write_text(render(board))
    assert load_profile(str(tmp_path / "board.toml")).int4 == cost


def test_a_profile_of_4_bit_weights_says_so() -> None:
    """The paper's 13B testbed: its own times for int4, a guess from bandwidth for anything else."""
    own = load_profile("paper-13b-int4")
    thirteen = model_bytes("llama-2-13b", "int4")
    fitted, how = scaled(own, thirteen)
    assert how == Scaling()
    assert fitted.stage_seconds(16, 10) == pytest.approx(0.4)
    smaller, how = scaled(own, model_bytes("llama-2-7b", "int4", "16bit"))
    assert how.basis == "profile"
    assert smaller.stage_seconds(16, 8) == pytest.approx(0.4 * 8 / 10 * 202.4 / 317.3, rel=0.01)
    assert smaller.lm_head.ms == pytest.approx(262.1 / 68, rel=0.01)
    quantised = scaled(own, model_bytes("llama-2-7b", "int4", "int4"))[0].lm_head.ms  # at the stages' rate
    assert quantised == pytest.approx(0.4e3 / 10 / 317.3 * 32_000 * 4096 / 1e6, rel=0.01)
    assert scaled(own, model_bytes("llama-2-7b", "fp16"))[1].basis == "bandwidth"


def test_a_profile_without_layer_mb_cannot_be_scaled() -> None:
    unknown = profile(layer_mb=None)
    assert scaled(unknown, size())[1] == Scaling()
    with pytest.raises(UsageError, match=r"profile board is for 32 layers of width 4096 and does not say"):
        scaled(unknown, size(layers=40, hidden_width=5120))


def test_a_full_cache_from_the_start() -> None:
    curve = StageCurve(layers=1, rows=[16, 64], ms=[6.0, 12.0], context_ms=[1.0, 3.0])
    whole = profile().model_copy(update={"stage": curve})
    full = at_context(whole, size(), 2000)
    for rows in (1, 16, 40, 64, 100):
        assert full.stage_seconds(rows, 8, 0) == pytest.approx(whole.stage_seconds(rows, 8, 2000))
        assert full.stage_seconds(rows, 8, 500) == full.stage_seconds(rows, 8, 0)
    assert at_context(profile(), size(), 2000) == profile()


def test_unmeasured_contexts_read_the_cache_at_bandwidth() -> None:
    """Llama-2-7B: 16,384 bytes a row and layer, 34 MB for 2048 tokens: 0.61 ms a layer at 55 GB/s."""
    nano, seven = load_profile("orin-nano-8gb"), model_bytes("llama-2-7b", "fp16")
    fitted, _ = scaled(nano, seven)
    read = 2048 * 16_384 / 55e9
    for rows in (1, 16, 200, 500):
        assert fitted.stage_seconds(rows, 8) == pytest.approx(nano.stage_seconds(rows, 8))
    for rows in (1, 16):
        assert fitted.stage_seconds(rows, 8, 2048) == pytest.approx(nano.stage_seconds(rows, 8) + 8 * read)
    full = at_context(fitted, seven, 2048)
    assert full.stage_seconds(16, 8) == pytest.approx(fitted.stage_seconds(16, 8, 2048))
    assert full.draft.pass_ms == pytest.approx(fitted.draft.pass_ms + 1e3 * read)  # the head has a layer
    assert full.draft.spd_pass_ms == pytest.approx(fitted.draft.spd_pass_ms + 2e3 * read)


@pytest.mark.parametrize(("name", "queries"), [("llama-2-7b", 4096), ("qwen3-32b", 64 * 128),
                                               ("qwen3.6-27b", 24 * 256 // 4), ("gpt-oss-20b", 64 * 64 // 2)])
def test_many_rows_multiply_with_the_context_at_the_rate_of_the_matrices(name: str, queries: int) -> None:
    """``queries``: heads times their width, of the share of the layers that see the whole text."""
    nano, model = load_profile("orin-nano-8gb"), model_bytes(name, "int4")
    assert model.queries == queries
    fitted, _ = scaled(nano, model)
    a_multiplication = (14.7 - 7.36) * 1e-3 / (364 - 182) / (405e6 / 2)  # s, from the profile's [stage]
    for rows in (256, 512, 2048):
        added = fitted.stage_seconds(rows, 8, 4096) - fitted.stage_seconds(rows, 8)
        assert added == pytest.approx(8 * rows * 4096 * 2 * queries * a_multiplication)


def test_virtual_time_of_a_profile_by_itself_knows_no_context() -> None:
    """Only a plan knows the model's cache: benchmarks under the paper's testbeds keep their figures."""
    own = load_profile("paper-7b")
    assert own.stage_seconds(16, 8, 100_000) == own.stage_seconds(16, 8) == 0.08


def test_a_head_with_its_own_vocabulary_is_charged_for_that() -> None:
    """Qwen3-8B's published head is EAGLE-3's: 32,000 of 151,936 tokens."""
    eight = model_bytes("qwen3-8b", "fp16")
    assert eight.draft_lm_head == 0
    own_head = 32_000 * 4096 * 2
    assert own_head < eight.draft < eight.lm_head
    nano = load_profile("orin-nano-8gb")
    per_mb = nano.stage.ms[0] / 405
    assert scaled(nano, eight)[0].draft.pass_ms == pytest.approx(eight.draft / 1e6 * per_mb)
    seven = model_bytes("llama-2-7b", "fp16")  # EAGLE-2's takes the target's
    assert seven.draft_lm_head == seven.lm_head


def test_devices_by_name_by_path_and_several_alike(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "mine.toml")
    members = parse_devices([str(path), "paper-7b:2", f"{path}:1"])
    assert [m.name for m in members] == ["mine-1", "paper-7b-1", "paper-7b-2", "mine-2"]
    assert [m.profile.name for m in members] == ["mine", "paper-7b", "paper-7b", "mine"]
    assert {m.role for m in members} == {"auto"}
    assert [m.name for m in parse_devices(["paper-7b"])] == ["paper-7b"]


def test_a_cluster_file_keeps_roles_and_reads_profiles(tmp_path: Path) -> None:
    write_profile(tmp_path / "mine.toml")
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    members = parse_devices([str(cluster)])
    assert [(m.name, m.role, m.profile.name) for m in members] == [
        ("left", "draft", "mine"), ("right", "verify", "paper-7b")]
    with pytest.raises(UsageError, match="2 boards have the name left"):
        parse_devices([str(cluster), str(cluster)])
    cluster.write_text(CLUSTER.replace('profile = "mine.toml"\n', ""))
    assert [m.name for m in parse_devices([str(cluster)])] == ["left", "right"]  # left is estimated


@pytest.mark.parametrize(("given", "message"), [
    ("nothing-like-it", "no profile 'nothing-like-it'"),
    ("paper-7b:0", "the count must be at least 1"),
    ("paper-7b:-2", "the count must be at least 1"),
    ("away/mine.toml", "there is no file away/mine.toml: find your boards with flowspec deploy init"),
])
def test_invalid_devices(given: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_devices([given])


def test_rows_add_up_to_what_the_model_needs() -> None:
    of = size(layers=10)
    p = SplitProblem(of, 2048, 1024)
    boards = [BoardSpec(f"b{i}", profile(usable_mb=2500 + 800 * i)).for_model(of)[0] for i in range(4)]
    rows = plan_rows(plan(boards, p), {b.name: Scaling() for b in boards})
    used = [row for row in rows if row.role]
    assert used[0].role == "D0"
    assert [row.role for row in used[1:]] == [f"V{i}" for i in range(1, len(used))]
    assert sum(row.weights_mb for row in used) == pytest.approx((of.target_weights + of.d0_weights) / MB)
    assert sum(row.kv_mb for row in used) == pytest.approx(3072 * (10 * of.kv_row + of.draft_kv_row) / MB)
    assert [row.layers[0] for row in used[1:] if row.layers] == [0, *(
        row.layers[1] for row in used[1:-1] if row.layers)]
    for row in used:
        assert row.headroom_mb == pytest.approx(
            row.usable_mb - row.weights_mb - row.kv_mb - 500 - D0_MB * (row.role == "D0"))
        assert row.headroom_mb >= 0
        assert row.used_mb == pytest.approx(row.usable_mb - row.headroom_mb)


def test_a_single_board_row_has_one_process() -> None:
    of = size(layers=4)
    p = SplitProblem(of, 1000, 1000)
    big, other = CandidateBoard("big", profile(usable_mb=20_000)), CandidateBoard("other", profile())
    row, left = alone_rows(big, [other], p, {"big": Scaling(), "other": Scaling()})
    assert (row.role, row.layers, row.process_mb) == ("D0+V1", (0, 4), 500 + D0_MB)
    assert row.weights_mb == pytest.approx((of.target_weights + of.d0_weights) / MB)
    assert row.stage_ms == pytest.approx(24)
    assert left.role is None
    assert left.why is not None
    assert "big alone holds everything" in left.why
