"""Whether a model fits, by what boards say of their memory over a real ssh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import shardkit
import sshkit

from flowspec_edge.fleet.checkup_model import check_model, judge_model, needed
from flowspec_edge.fleet.deployment import resolve_deployment
from flowspec_edge.fleet.inventory import Inventory
from flowspec_edge.manifest import Manifest
from flowspec_edge.modeldir import resolve_model


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshkit.Boards]:
    with sshkit.boards(2, tmp_path_factory.mktemp("boards")) as boards, boards.bed.entered(boards.outside):
        yield boards


def with_model(boards: sshkit.Boards, **cluster: object) -> Inventory:
    settings = boards.inventory.cluster.model_copy(update={"board_python": "/usr/bin/python3", **cluster})
    return boards.inventory.model_copy(update={"cluster": settings})


@sshkit.needs_boards
def test_a_small_model_fits_and_endless_text_does_not(boards: sshkit.Boards, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    fits = check_model(with_model(boards, model="demo"), path)
    assert {name: finding.state for name, finding in fits.items()} == {
        "board-0": "ok", "board-1": "ok", "board-2": "ok"}
    assert all("part of demo needs 0." in finding.found for finding in fits.values())
    endless = check_model(with_model(boards, model="demo", context=10**12), path)
    assert {finding.state for finding in endless.values()} == {"failed"}
    nobody = check_model(with_model(boards, model="demo", board_python="python4"), path)
    assert {finding.state for finding in nobody.values()} == {"unknown"}
    (wrong,) = check_model(with_model(boards, model="no-such-model"), path).items()
    assert (wrong[0], wrong[1].state) == ("board-0", "failed")


@sshkit.needs_boards
def test_what_is_needed_is_what_the_manifest_says(boards: sshkit.Boards, tmp_path: Path) -> None:
    """The sizes that are worked out for a checkpoint are those that sharding it writes down, but for the
    final norm, which is VN's alone."""
    shardkit.cut(resolve_model("demo").path, tmp_path / "shards", 2, "fp16")
    path = tmp_path / "cluster.toml"
    whole = needed(resolve_deployment(with_model(boards, model="demo", dtype="fp16"), path))
    cut = needed(resolve_deployment(with_model(boards, model="shards"), path))
    assert list(whole) == list(cut) == ["board-0", "board-1", "board-2"]
    norm = 2 * Manifest.read(tmp_path / "shards").hidden_width
    assert (whole["board-1"] - norm, whole["board-2"]) == (cut["board-1"], cut["board-2"])


def test_judging() -> None:
    assert judge_model("m", 10**9, 10**9).state == "ok"
    assert judge_model("m", 10**9 + 1, 10**9).state == "failed"
