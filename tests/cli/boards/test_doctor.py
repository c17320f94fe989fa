"""``flowspec doctor`` on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from kits.error_lines import error_line
from kits.torch_devices import without_cuda

from flowspec_edge.boards.doctor import gpu_report, run
from flowspec_edge.boards.doctor.gpu_report import GpuReport
from flowspec_edge.boards.probe.checks import CheckScope
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.cli.main import main


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What the release finds: tests/boards asks the real libraries, which takes seconds."""
    findings = [Finding("flowspec", "ok", "1.0"), Finding("torch", "ok", "2.13.0")]
    monkeypatch.setattr(run, "check_release", lambda l4t: findings)
    return findings


def test_a_table_and_json_say_the_same(quick: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    (board,) = document["boards"]
    assert board["name"] == "this machine"
    assert [finding["check"] for finding in board["findings"]][:3] == ["flowspec", "board", "python"]
    assert board["findings"][-1] == {"check": "torch", "state": "ok", "found": "2.13.0", "advice": ""}
    assert main(["doctor"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()]
    assert rows[:4] == ["this", "flowspec", "board", "python"]


def test_what_failed_is_the_exit_code_and_has_its_next_step(quick: list[Finding],
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    quick[1] = Finding("gpu", "failed", "sees no [GPU]", "see the groups")
    assert main(["doctor"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "failed sees no [GPU]" in out
    assert "→ see the groups" in out
    assert main(["doctor", "--json", "--storage", "/nowhere/at/all"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    failed = {f["check"] for f in document["boards"][0]["findings"] if f["state"] == "failed"}
    assert failed >= {"gpu", "disk"}


def test_fixes_are_reported_only_with_fix(quick: list[Finding], monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """The machine's own findings are left alone here: what is done with remedies, tests/boards shows."""
    found = [Finding("memory", "ok", "enough")]
    monkeypatch.setattr(run, "judge", lambda place, subject: found)
    assert main(["doctor", "--json", "--fix"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [finding["fixed"] for finding in document["boards"][0]["findings"]] == [False, False, False]
    found[0] = Finding("time", "warning", "NTP is off", "switch it on", (("true",),))
    assert main(["doctor", "--fix"]) == 0
    assert "NTP is off; done: true, without effect" in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", "--json"]) == 0
    assert "fixed" not in capsys.readouterr().out


@pytest.mark.parametrize("state", ["ok", "failed"])
def test_the_report_on_a_gpu(state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                             ) -> None:
    """As a table and as JSON; tests/boards makes a real one."""
    tokens: Literal["ok", "failed"] = "failed" if state == "failed" else "ok"
    checks: dict[CheckScope, list[Finding]] = {
        "products": [Finding("fp16", "ok", error=4e-4), Finding("nf4", "skipped", "not [here]")],
        "tokens": [Finding("fp16 flowspec_plus T=1", tokens, "96 tokens")]}
    monkeypatch.setattr(gpu_report, "check_gpu",
                        lambda tokens, device, report: GpuReport(device, "Orin", (8, 7), checks))
    code = int(state == "failed")
    assert main(["doctor", "--gpu"]) == code
    out = capsys.readouterr().out
    assert "Orin, compute capability 8.7" in out
    assert "not [here]" in out
    assert ("1 of 3 checks failed on cuda" in out) == (state == "failed")
    assert main(["doctor", "--gpu", "--device", "cuda:1", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["device"], told["compute_capability"]) == (state == "ok", "cuda:1", [8, 7])
    assert told["checks"][0] == {"group": "products", "name": "fp16", "check": "fp16", "state": "ok", "found": "",
                                 "advice": "", "error": 4e-4}


def test_without_a_gpu_there_is_nothing_to_test(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--gpu"] + (["--device", "cuda:99"] if torch.cuda.is_available() else [])
    assert "no cuda" in error_line(capsys, main(arguments))


@pytest.mark.slow
@without_cuda
def test_a_board_whose_torch_sees_no_gpu_has_a_report(quick: list[Finding], tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """The error is the report's, too; a place that cannot be written fails before all else."""
    out = tmp_path / "board.json"
    assert main(["doctor", "--gpu", "--report", str(out)]) == 2
    printed, err = capsys.readouterr()
    assert printed == ""
    assert f"Written to {out}" in err
    found = json.loads(out.read_text())
    assert "no cuda here" in found["gpu"]["error"]
    assert "no cuda here" in found["profile"]["error"]
    assert [finding["check"] for finding in found["doctor"]][:2] == ["flowspec", "board"]
    assert main(["doctor", "--gpu", "--report", str(tmp_path / "none" / "board.json")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
