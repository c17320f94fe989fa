"""``flowspec sweep bandwidth --cluster``: boards with a real sshd each, shaped, measured and put back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits import ssh_boards

from flowspec_edge.cli.main import main
from flowspec_edge.util.interpreter import module_command

SHORT = ["--strategies", "autoregressive,chunk_pp", "--limit", "1", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_boards.Boards]:
    with ssh_boards.boards(1, tmp_path_factory.mktemp("boards")) as boards, boards.bed.entered(0):
        yield boards


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "def one(n):"}) + "\n")
    return path


@pytest.mark.slow
@ssh_boards.needs_boards
@pytest.mark.parametrize("rates", [[50], pytest.param([50, 10], marks=pytest.mark.soak)])
def test_real_boards_are_shaped_measured_and_put_back(
        boards: ssh_boards.Boards, model: Path, prompts: Path, tmp_path: Path, rates: list[int],
        capsys: pytest.CaptureFixture[str]) -> None:
    """Each rate starts the board's stage anew, which imports for seconds."""
    before = [boards.shown(place) for place in (0, 1)]
    out = tmp_path / "real.json"
    axis = f"bandwidth={','.join(map(str, rates))}"
    assert main(["sweep", axis, *SHORT, "--cluster", str(boards.file), "--model", str(model), "--prompts",
                 str(prompts), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["links"], found["emulated"], found["clock"], found["profile"]) == (
        "cluster", False, "wall", None)
    assert found["settings"]["stages"] == 1
    assert [point["value"] for point in found["points"]] == rates
    for point in found["points"]:
        payload = point["value"] * 1448 / 1514  # of the frames that the rate counts
        # Measured once for each rate, on a machine that may be busy.
        assert point["measured_mbps"] == pytest.approx([payload, payload], rel=0.25)
        assert [row["identical"] for row in point["rows"]] == [True, True]
    assert "wall clock, a cluster's shaped links, 1 stage" in capsys.readouterr().out
    assert [boards.shown(place) for place in (0, 1)] == before
    worker = " ".join(module_command("flowspec_edge.drivers.stage", python=sys.executable))
    assert boards.left(1, worker) == 0


@pytest.mark.slow
@ssh_boards.needs_boards
def test_boards_keep_their_stages_while_a_parameter_changes(
        boards: ssh_boards.Boards, model: Path, prompts: Path, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    before, out = [boards.shown(place) for place in (0, 1)], tmp_path / "real.json"
    assert main(["sweep", "segment=2,8", *SHORT, "--cluster", str(boards.file), "--model", str(model),
                 "--prompts", str(prompts), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["links"], found["axis"]) == ("cluster", "segment")
    assert [point["measured_mbps"] for point in found["points"]] == [None, None]
    assert all(row["identical"] for point in found["points"] for row in point["rows"])
    assert "wall clock, a cluster's links, 1 stage" in capsys.readouterr().out
    assert [boards.shown(place) for place in (0, 1)] == before


@ssh_boards.needs_boards
@pytest.mark.soak
def test_a_board_without_the_model_is_named_and_all_are_put_back(
        boards: ssh_boards.Boards, model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [boards.shown(place) for place in (0, 1)]
    code = main(["sweep", "bandwidth=200", *SHORT, "--cluster", str(boards.file), "--model", str(model),
                 "--prompts", str(prompts), "--board-model", "/nowhere"])
    said = capsys.readouterr().err
    assert code != 0
    assert "/nowhere" in said
    assert len(said.strip().splitlines()) == 1
    assert [boards.shown(place) for place in (0, 1)] == before
