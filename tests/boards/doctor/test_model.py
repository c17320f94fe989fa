"""Whether a model fits on boards, by their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits import sharded_models, ssh_boards

from flowspec_edge.boards.deploy.resolve import resolve_deployment
from flowspec_edge.boards.doctor.model import board_parts, needed_bytes
from flowspec_edge.boards.probe.checks import judge
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.boards.probe.service_rules import BoardPart
from flowspec_edge.model.manifest import Manifest
from flowspec_edge.model.opened import resolve_model


@ssh_boards.needs_boards
def test_a_small_model_fits_and_an_endless_context_does_not(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    path, all_boards = tmp_path / "cluster.toml", {"board-0", "board-1", "board-2"}
    available = dict.fromkeys(all_boards, 8 * 10**9)

    def check(free: dict[str, int], **cluster: object) -> dict[str, Finding]:
        parts = board_parts(boards.with_cluster(board_python="/usr/bin/python3", **cluster), path, free)
        found = {name: judge("bare", part) for name, part in parts.items()}
        assert all([finding.check for finding in findings] == ["model"] for findings in found.values())
        return {name: findings[0] for name, findings in found.items()}

    fits = check(available, model="demo")
    assert {name: finding.state for name, finding in fits.items()} == dict.fromkeys(all_boards, "ok")
    assert all("part of demo needs 0." in finding.found for finding in fits.values())
    endless = check(available, model="demo", context=10**12)
    assert {finding.state for finding in endless.values()} == {"failed"}
    small = check({**available, "board-1": 10**6}, model="demo")
    assert {name for name, finding in small.items() if finding.state == "failed"} == {"board-1"}
    assert {finding.state for finding in check({}, model="demo").values()} == {"unknown"}
    (wrong,) = check(available, model="no-such-model").items()
    assert (wrong[0], wrong[1].state) == ("board-0", "failed")


@ssh_boards.needs_boards
def test_what_is_needed_is_what_the_manifest_says(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    """The sizes that are worked out for a checkpoint are those that sharding it writes down, but for the
    final norm, which is VN's alone."""
    sharded_models.cut(resolve_model("demo").path, tmp_path / "shards", 2, "fp16")
    path = tmp_path / "cluster.toml"
    whole = needed_bytes(resolve_deployment(boards.with_cluster(model="demo", dtype="fp16"), path))
    cut = needed_bytes(resolve_deployment(boards.with_cluster(model="shards"), path))
    assert list(whole) == list(cut) == ["board-0", "board-1", "board-2"]
    norm = 2 * Manifest.read(tmp_path / "shards").hidden_width
    assert (whole["board-1"] - norm, whole["board-2"]) == (cut["board-1"], cut["board-2"])


@pytest.mark.parametrize(("part", "state"), [
    (BoardPart("m", 10**9, 10**9), "ok"), (BoardPart("m", 10**9 + 1, 10**9), "failed"),
    (BoardPart("m", 10**9, None, "python3"), "unknown"), (BoardPart("m", idle="no layers are left"), "ok")])
def test_judging(part: BoardPart, state: str) -> None:
    [finding] = judge("bare", part)
    assert (finding.check, finding.state) == ("model", state)
