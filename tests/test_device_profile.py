"""Profiles: the curves against numpy and by hand, what a faulty file says, and round trips as TOML."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples

from flowspec_edge.device_profile import (
    Conditions,
    LaunchCost,
    Profile,
    StageCurve,
    load_profile,
    profile_names,
    render,
)
from flowspec_edge.errors import UsageError
from flowspec_edge.util.resources import resource_dir

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"]), max_size=300)
WORDS = st.lists(st.sampled_from(["layers", 'say "so"', "back\\slash", "a" * 130, "é", "", "\t", '"""']),
                 max_size=60).map(" ".join)


def test_paper_7b_is_the_testbed_of_the_paper() -> None:
    profile = load_profile("paper-7b")
    per_stage = profile.model.layers / 4
    assert (profile.kind, per_stage) == ("testbed", 8)
    for rows, ms in [(0, 0), (1, 80), (16, 80), (17, 80.65), (32, 90.4), (80, 121.6), (216, 210)]:
        assert profile.stage_seconds(rows, per_stage) == pytest.approx(ms / 1e3)
    assert profile.stage_seconds(16, 4) == pytest.approx(0.040)  # eight stages: half the layers each
    assert profile.stage_seconds(16, 32 / 14) == pytest.approx(0.080 * 4 / 14)
    assert (profile.draft.pass_ms, profile.lm_head.ms, profile.model.hidden_width) == (15, 5, 4096)


def test_a_link_is_occupied_by_bits_and_late_by_its_latency() -> None:
    occupied, latency = load_profile("paper-7b").link_seconds(16 * 4096 * 2)
    assert occupied == pytest.approx(16 * 4096 * 2 * 8 / 1e9)
    assert latency == pytest.approx(0.0002)


def test_each_node_of_a_pass_may_cost() -> None:
    profile = load_profile("paper-7b")
    assert profile.draft_seconds("eagle2", 10) == profile.draft_seconds("eagle2") == 0.015
    dearer = profile.model_copy(update={"draft": profile.draft.model_copy(update={"row_ms": 0.5})})
    assert dearer.draft_seconds("eagle2", 10) == pytest.approx(0.020)
    assert dearer.draft_seconds("eagle2") == pytest.approx(0.0155)
    assert dearer.draft_seconds("eagle2-deep", 10) == dearer.draft_seconds("eagle2", 10)


def test_the_price_of_a_launch_is_optional_and_comes_back(tmp_path: Path) -> None:
    own = load_profile("paper-7b")
    assert own.launch is None
    assert "launch" not in render(own)
    dear = own.model_copy(update={"launch": LaunchCost(us=31.5, layer=20)})
    path = tmp_path / "dear.toml"
    path.write_text(render(dear), encoding="utf-8")
    assert load_profile(str(path)) == dear
    assert dear.draft_seconds("ngram") == 0
    assert dear.draft_seconds("lm") == pytest.approx(0.045 + 18 * 31.5e-6)  # of 400, the others are hidden
    assert dear.verify_seconds(0) == own.verify_seconds(0)


def test_what_is_charged_is_not_in_what_was_measured() -> None:
    """Less the launches and with them again, a pass takes what it took."""
    launch = LaunchCost(us=30)
    assert launch.without(9.0, 36) == pytest.approx(9.0 - 36 * 0.03)
    assert launch.without(9.0, 36) / 1e3 + launch.added(1.0, 10, 36) == pytest.approx(0.009)
    assert launch.without(1.0, 36) == 0.01  # a GPU's that a launch takes longer than its work


def test_a_kind_may_have_a_time_of_its_own(tmp_path: Path) -> None:
    profile = load_profile("paper-7b")
    assert profile.draft_seconds("spd", 0) == pytest.approx(0.025)
    path = tmp_path / "p.toml"
    path.write_text(re.sub("^spd_pass_ms.*", "other_pass_ms = 7  # of a kind that is not installed", render(profile),
                           flags=re.MULTILINE))
    bare = load_profile(str(path))
    assert bare.draft_seconds("spd", 0) == pytest.approx(2 * 0.080 / 8 + 0.005)  # its layers, and lm_head
    assert Profile.model_validate_json(bare.model_dump_json()) == bare
    assert "other_pass_ms = 7" in render(bare)


def test_recorded_passes_launch_less() -> None:
    own = load_profile("paper-7b")
    dear, recorded = (own.model_copy(update={"launch": LaunchCost(us=30, pass_graphs=graphs)})
                      for graphs in (False, True))
    for kind, before, after in (("eagle2", 33, 6), ("lm", 18, 5), ("ngram", 0, 0), ("spd", 38, 38)):
        free = own.draft_seconds(kind)
        assert dear.draft_seconds(kind) >= free + before * 30e-6 - 1e-12
        assert recorded.draft_seconds(kind) == pytest.approx(free + after * 30e-6)


STEPS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=2, max_size=6)


@given(STEPS, st.integers(1, 600))
def test_curve_is_numpys_interpolation_with_the_last_slope(steps: list[tuple[int, int]], rows: int) -> None:
    x = np.cumsum([dx for dx, _ in steps]).astype(float)
    y = 1.0 + np.cumsum([dy for _, dy in steps])
    curve = StageCurve(layers=1, rows=x.tolist(), ms=y.tolist())
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    expected = np.interp(rows, x, y) if rows <= x[-1] else y[-1] + slope * (rows - x[-1])
    assert curve.milliseconds(rows) == pytest.approx(float(expected))


def test_a_curve_of_one_corner_is_flat() -> None:
    assert StageCurve(layers=1, rows=[16], ms=[7.0]).milliseconds(500) == 7.0


def faulty(tmp_path: Path, old: str, new: str) -> Path:
    text = (resource_dir("profiles") / "paper-7b.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


@pytest.mark.parametrize(("old", "new", "says"), [
    ("[draft]", "[draft]\nlm_pas_ms = 3", "draft.lm_pas_ms: unknown key; did you mean lm_pass_ms or pass_ms?"),
    ("[draft]", "[draft]\nother_pass_ms = -3", "draft.other_pass_ms: input should be greater than or equal to 0"),
    ("[link]", "[link]\nlatency = 3", "unknown key 'link.latency': did you mean 'latency_ms'?"),
    ("pass_ms = 15.0", "", "missing key 'draft.pass_ms'"),
    ("[lm_head]", "[head]", "missing key 'lm_head'; line 28: unknown key 'head': did you mean 'lm_head'?"),
    ("mbps = 1000", "mbps = 0", "link.mbps: input should be greater than 0"),
    ("rows = [16, 116]", "rows = [116, 16]", "stage: rows must increase"),
    ("rows = [16, 116]", "rows = [16]", "stage: rows and ms must be equally long, not 1 and 2"),
    ('kind = "testbed"', 'kind = "cloud"', "kind: input should be 'testbed' or 'device'"),
])
def test_a_faulty_profile_is_one_line_with_file_and_key(tmp_path: Path, old: str, new: str,
                                                        says: str) -> None:
    path = faulty(tmp_path, old, new)
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        load_profile(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no profile 'nano'; there are agx-orin-64gb, cpu-2core, orin-"):
        load_profile("nano")
    says = r"there is no profile .*absent\.toml: .* flowspec device profile --out"
    with pytest.raises(UsageError, match=says):
        load_profile(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_says_where_it_comes_from_and_comes_back(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.source.strip()
    assert "\n" not in profile.summary
    text = render(profile)
    path = tmp_path / "again.toml"
    path.write_text(text, encoding="utf-8")
    assert load_profile(str(path)) == profile
    assert max(map(len, text.splitlines()[:-1])) <= 200


@examples(50, quick=20)
@given(source=TEXT | WORDS, machine=TEXT, clocks=st.dictionaries(TEXT, st.floats(0, 1e6), max_size=3))
def test_any_text_comes_back(source: str, machine: str, clocks: dict[str, float]) -> None:
    conditions = Conditions(machine=machine, clocks_mhz=clocks, temperature_c=41.5, threads=2)
    profile = load_profile("paper-7b").model_copy(update={"source": source, "conditions": conditions})
    data = tomllib.loads(render(profile))
    assert data["source"] == source
    assert data["conditions"].get("machine", "") == machine
    assert data["conditions"].get("clocks_mhz", {}) == clocks


def test_a_block_is_charged_once_a_root() -> None:
    """2.46 GB of weights, by Llama-2-7B's shape, beside the 0.74 GB that take an EAGLE pass 15 ms."""
    profile = load_profile("paper-7b")
    layer, state, head = 4 * 4096**2 + 3 * 4096 * 11008, 4096**2, 4096 * 32000
    eagle, block = layer + 2 * state + head, 5 * layer + 5 * state + head
    assert profile.draft_seconds("dspark") == pytest.approx(0.015 * block / eagle, rel=0.02)
    assert profile.draft_seconds("dflash", 10, scored=True) < 0.001
    assert profile.draft_seconds("eagle3") == 0.015
