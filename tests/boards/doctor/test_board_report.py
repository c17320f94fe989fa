"""The report that a board sends: its parts by real processes, and what must not be in it."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from kits.tiny_models import tiny_llama
from kits.torch_devices import without_cuda

from flowspec_edge.boards.doctor import board_report as module
from flowspec_edge.boards.doctor.board_report import (
    PARTS,
    board_report,
    journal,
    tegrastats,
    without_secrets,
)
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.device_profile import Profile
from flowspec_edge.transport.keys import generate

TEGRA = ("11-25-2026 20:30:00 RAM 1880/7620MB (lfb 4x4MB) CPU [2%@1510,0%@1510] GR3D_FREQ 0% cpu@48.2C "
         "VDD_IN 4836mW/4836mW")


def script(path: Path, text: str) -> list[str]:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return [str(path)]


def test_tegrastats_says_a_line_and_is_stopped(tmp_path: Path) -> None:
    """It never ends by itself."""
    endless = script(tmp_path / "tegrastats", f"while :; do echo '{TEGRA}'; sleep 0.5; done")
    assert tegrastats(endless) == TEGRA
    assert tegrastats([str(tmp_path / "none")]) == ""


def test_the_journal_without_secrets(tmp_path: Path) -> None:
    """A key pair as deployments make them, tokens as clients send them, and figures that must stay."""
    keys = generate()
    public, secret = keys.public.decode(), keys.secret.decode()
    lines = [f"peer key {public} {secret} from 10.0.0.12:7702 refused",
             "Authorization: Bearer sk-abc.d1 sent",
             "FLOWSPEC_API_KEY=hunter2 in the environment", f"api_key={secret}",
             "torch 2.8.0 on L4T 36.4.7: NvMapMemAllocInternalTagged: 1075072515 error 12",
             "/opt/flowspec/releases/0123456789abcdef/venv/bin/python: no such file",
             "client fe80::1ff:fe23:4567:890a went"]
    entries = [json.dumps({"_SYSTEMD_UNIT": "flowspec-draft.service", "MESSAGE": line}) for line in lines]
    (tmp_path / "entries").write_text("\n".join([*entries, "no JSON", json.dumps({"MESSAGE": [1, 2]})]))
    told = journal(script(tmp_path / "journalctl", f"cat {tmp_path}/entries"))
    assert told == [f"flowspec-draft.service: {line}" for line in (
        "peer key … … from ADDRESS:7702 refused", "Authorization: … … sent",
        "FLOWSPEC_API_KEY=… in the environment", "api_key=…", lines[4], lines[5], "client ADDRESS went")]
    assert journal([str(tmp_path / "none")]) == []


@pytest.mark.parametrize("harmless", [
    "deployed in 130 s: 76 changes", "stage 2 of 4: layers 8 to 15, 3,240 MB",
    "24 tokens (length), 7.67 tokens/s", "2026-11-25 20:28:31: ready",
    "RuntimeError: c10::Error in at::native::add, std::bad_alloc"])
def test_ordinary_lines_stay(harmless: str) -> None:
    assert without_secrets(harmless) == harmless


@pytest.mark.slow
@without_cuda
def test_a_part_that_fails_is_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of a GPU that is not there, by the real command; a doctor that breaks."""
    def broken() -> list[Finding]:
        raise OSError("Input/output error")

    monkeypatch.setattr(module, "check_machine", broken)
    doing: list[str] = []
    found = board_report({"error": "no cuda here"}, "cuda", "2026-11-25", report=doing.append)
    assert found["gpu"] == {"error": "no cuda here"}
    assert found["doctor"] == {"error": "Input/output error"}
    assert "no cuda here" in found["profile"]["error"]
    assert found["versions"]["torch"] == version("torch")
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["memory"]["MemFree"] > 0
    assert doing == ["versions", "board", "memory", "doctor", "tegrastats", "profile", "journal"]
    assert len(doing) == PARTS
    assert json.loads(json.dumps(found)) == found


@pytest.mark.slow
@pytest.mark.nightly
def test_a_whole_report(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "target", layers=2, hidden=32).parent  # without drafts, it is measured faster
    found = board_report({"ok": True}, "cpu", "2026-11-25", ("--quick", "--model", str(model)))
    assert Profile.model_validate(found["profile"]).provenance == "measured"
    assert {finding["check"] for finding in found["doctor"]} > {"memory", "disk", "torch", "product", "4 bits"}
