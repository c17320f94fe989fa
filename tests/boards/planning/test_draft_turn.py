"""The draft device as the bottleneck: by arithmetic, and in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.boards.planning.draft_turn import DraftTurn, device_mismatch, draft_turn
from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import (
    Conditions,
    DraftCost,
    HostCost,
    LaunchCost,
    LmHeadCost,
    Profile,
    load_profile,
)
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.model.draft_kinds import NGRAM


def paper(pass_ms: float = 15.0, head_ms: float = 5.0) -> Profile:
    """The paper's testbed with another draft device."""
    found = load_profile("paper-7b")
    return found.model_copy(update={
        "draft": DraftCost(pass_ms=pass_ms, lm_pass_ms=45, spd_pass_ms=25, row_ms=0.1),
        "lm_head": LmHeadCost(ms=head_ms, row_ms=0.5), "host": HostCost(bookkeeping_ms=2)})


def test_a_turn_is_one_output_and_one_pass() -> None:
    turn = draft_turn(paper(), 0.08, 16)
    assert turn.output == pytest.approx(0.005 + 16 * 0.0005 + 0.002)
    assert turn.draft == pytest.approx(0.015 + 10 * 0.0001)
    assert (turn.passes, turn.is_bottleneck, turn.warning("a")) == (4, False, "")
    assert turn.as_json() == {"output_ms": 15.0, "draft_pass_ms": 16.0, "turn_ms": 31.0, "slot_ms": 80.0,
                              "passes_a_turn": 4, "bottleneck": False}
    assert draft_turn(paper(), 0.0311, 16).is_bottleneck is False
    assert draft_turn(paper(), 0.0309, 16).is_bottleneck is True
    # Beside a message's time these do not count: the demonstration model on a board.
    assert not DraftTurn(output=0.00002, draft=0.00001, slot=0.000027).is_bottleneck
    assert draft_turn(paper(), 0.01, 16).passes == 0
    assert "take 31 ms a turn, the slowest stage 20 ms" in draft_turn(paper(), 0.02, 16).warning("a")
    looked_up = draft_turn(paper(), 0.02, 16, NGRAM)
    assert (looked_up.draft, looked_up.passes, looked_up.is_bottleneck) == (0, None, False)


def test_launches_of_a_turn_are_not_hidden() -> None:
    """10 of an output and 33 of a pass; look-up launches none."""
    dear = paper().model_copy(update={"launch": LaunchCost(us=50)})
    turn, before = (draft_turn(profile, 0.08, 16) for profile in (dear, paper()))
    assert turn.output - before.output == pytest.approx(0.0005)
    assert turn.draft - before.draft == pytest.approx(0.00165)
    assert draft_turn(dear, 0.08, 16, NGRAM).draft == 0


@pytest.mark.parametrize(("measured", "torch_device", "advised"), [
    ("cpu", "", True), ("cuda: Orin", "", False), ("", "", False), ("", "cpu", True),
    ("cuda: Orin", "cpu", True), ("cpu", "cuda", False)])
def test_the_gpu_is_advised_where_it_is_not_used(measured: str, torch_device: str, advised: bool) -> None:
    d0 = paper().model_copy(update={"conditions": Conditions(device=measured)})
    text = draft_turn(d0, 0.02, 16, torch_device=torch_device).warning("a")
    assert "a faster board" in text
    assert ("its GPU" in text) is advised


@pytest.mark.parametrize(("pass_ms", "head_ms", "bottleneck"), [(15, 5, False), (300, 200, True)])
def test_the_bottleneck_is_busiest_in_virtual_time(pass_ms: float, head_ms: float, bottleneck: bool,
                                                   tmp_path: Path) -> None:
    """A draft board on its CPU is busy longer than V1; on its GPU it is the other way round."""
    profile = paper(pass_ms, head_ms)
    cluster = VirtualCluster(tiny_model_dir(tmp_path, layers=4, hidden=32), 4, profile)
    assert draft_turn(profile, cluster.devices.slot_seconds(16), 16).is_bottleneck is bottleneck
    cluster.generate(Request([5, 17, 42, 3], "flowspec", 12))
    busy = [sum(span.end - span.start for span in cluster.spans if span.device == place)
            for place in (0, 1)]
    assert (busy[0] > busy[1]) is bottleneck


def test_a_profile_is_of_one_device() -> None:
    def measured(device: str) -> Profile:
        return load_profile("paper-7b").model_copy(update={"conditions": Conditions(device=device)})

    assert device_mismatch(measured("cuda: Orin"), "cuda:1") == device_mismatch(measured("cpu"), "cpu") == ""
    assert device_mismatch(measured(""), "cuda") == device_mismatch(load_profile("paper-7b"), "cuda") == ""
    assert "--device cpu" in device_mismatch(measured("cuda: Orin"), "cpu")
    assert "--device cuda" in device_mismatch(measured("cpu"), "cuda:0")
    assert "is of a cuda device" in device_mismatch(load_profile("orin-nano-8gb"), "cpu")
