"""``flowspec record``, and the commands that take a recording in place of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowspec_edge.cli.main import main
from flowspec_edge.drivers.virtual.recording import load_recording
from flowspec_edge.lab.reproduce import catalogue
from flowspec_edge.lab.reproduce.catalogue import ARTEFACTS
from flowspec_edge.strategies.registry import strategy_names


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "demo.flowrec"
    assert main(["record", "--out", str(path), "--limit", "1", "--max-new-tokens", "12", "--nodes", "64", "--seed", "3",
                 "--licence", "ours"]) == 0
    return path


def test_what_a_recording_says_of_itself(recording: Path) -> None:
    found = load_recording(recording)
    assert (found.model, found.draft, found.temperatures) == ("demo", "eagle2", [0.0, 1.0])
    assert len(found.texts) == 2
    assert found.provenance["licence"] == "ours"
    assert len(found.provenance["digest"]) == len(found.provenance["head"]) == 64
    assert not recording.with_name("demo.flowrec.work").exists()


def test_a_benchmark_over_a_recording(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["bench", "run", "--recording", str(recording), "--temperatures", "0,1", "--strategies",
                 "autoregressive,chunk_pp,flowspec_plus", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["settings"]["recording"]["licence"] == "ours"
    assert {sample["identical"] for sample in report["samples"]} == {True}
    assert {sample["tokens"] for sample in report["samples"]} == {12}
    assert "recorded in fp32" in capsys.readouterr().out


def test_processes_measure_what_one_does(recording: Path, tmp_path: Path) -> None:
    figures = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        assert main(["bench", "run", "--recording", str(recording), "--temperatures", "0,1", "--strategies",
                     "chunk_pp,flowspec_plus", "--acceptance", "0.8", "--jobs", jobs, "--json", str(out)]) == 0
        samples = json.loads(out.read_text())["samples"]
        figures.append([(one["strategy"], one["temperature"], one["tokens_per_second"]) for one in samples])
    assert figures[0] == figures[1]
    assert len(figures[0]) == 4


def test_all_strategies_are_those_that_the_recording_can_draft(recording: Path, capsys: pytest.CaptureFixture[str]
                                                               ) -> None:
    """A strategy that was named stays an error."""
    asked = ["bench", "run", "--recording", str(recording), "--max-new-tokens", "2", "--strategies"]
    assert main([*asked, "spd,autoregressive"]) == 2
    assert capsys.readouterr().err.count("spd drafts with SPD module") == 1
    assert main([*asked, "all"]) == 0
    printed = capsys.readouterr()
    notes = [line for line in printed.err.splitlines() if "is left out" in line]
    assert [line.split()[2] for line in notes] == ["spd"]
    measured = [line.split()[0] for line in printed.out.splitlines() if "eagle2" in line or " none " in line]
    assert {*strategy_names()} - {*measured} == {"spd"}


@pytest.mark.slow
@pytest.mark.parametrize("names", [
    ("flowspec-figure-6", "pipedec-stages", "spd-law", "methods"),
    pytest.param((*ARTEFACTS,), marks=pytest.mark.nightly)], ids=["some", "every"])
def test_what_a_recording_can_reproduce(recording: Path, names: tuple[str, ...], tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of "all"; a name that it cannot is an error."""
    monkeypatch.setattr(catalogue, "ARTEFACTS", {name: ARTEFACTS[name] for name in names})
    out = tmp_path / "out"
    asked = ["--recording", str(recording), "--out", str(out), "--max-new-tokens", "6", "--json"]
    assert main(["reproduce", "spd-law", *asked]) == 2
    assert "spd drafts with SPD module" in capsys.readouterr().err
    assert not out.exists()
    assert main(["reproduce", "all", *asked]) == 0
    printed = capsys.readouterr()
    made = [one["name"] for one in json.loads(printed.out)["reproduced"]]
    left_out = [line.split()[2] for line in printed.err.splitlines() if "is left out" in line]
    assert left_out == ["pipedec-stages", "spd-law", "methods"]
    assert {*made} == {*names} - {*left_out}


def test_a_sweep_over_a_recording(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "bandwidth=1000,10", "--recording", str(recording), "--strategies",
                 "megatron,flowspec"]) == 0
    printed = capsys.readouterr().out
    assert "0 of 4 answers" in printed
    assert "1000 Mbps" in printed
