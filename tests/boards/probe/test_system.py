"""The probe's facts on a system: real interfaces, packages in dpkg's own files, and an older Python."""

from __future__ import annotations

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowspec_edge.boards.images import launcher
from flowspec_edge.boards.links import tcp_linktest
from flowspec_edge.boards.probe.facts import (
    _MODULES,
    BoardFacts,
    BoardStatus,
    SystemFacts,
    parse,
    program,
    torch_check_program,
)
from flowspec_edge.boards.probe.onboard import system, torch_check


def test_wifi_and_a_slow_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a /sys/class/net as kernels write it; the addresses are this machine's."""
    monkeypatch.setattr(system, "_NET_CLASS", str(tmp_path))
    (tmp_path / "lo/phy80211").mkdir(parents=True)
    (tmp_path / "lo/speed").write_text("-1\n")
    assert system.links()["lo"] == {"wireless": True, "mbps": None, "dynamic": False}
    (tmp_path / "lo/phy80211").rmdir()
    (tmp_path / "lo/speed").write_text("100\n")
    assert system.links()["lo"] == {"wireless": False, "mbps": 100, "dynamic": False}


@pytest.mark.skipif(shutil.which("dpkg-query") is None,
                    reason="dpkg-query is missing: this machine has no Debian packages")
def test_packages_that_apt_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"nvidia-l4t-core": "hold ok installed", "nvidia-l4t-cuda": "install ok installed",
              "nvidia-l4t-old": "deinstall ok config-files", "bash": "install ok installed"}
    (tmp_path / "status").write_text("\n".join(
        f"Package: {name}\nStatus: {state}\nVersion: 36.4.3\nArchitecture: all\n"
        for name, state in states.items()))
    monkeypatch.setenv("DPKG_ADMINDIR", str(tmp_path))
    assert system.l4t_packages() == {"nvidia-l4t-core": True, "nvidia-l4t-cuda": False}


ASKED: dict[str, dict[str, Any]] = {
    "service": {"host": "127.0.0.1", "port": 1, "rails": []},
    "system": {"address": "127.0.0.1", "paths": ["/opt"], "ports": [],
               "torch_check": torch_check_program("cpu")},
    "deployment": {"environment": "", "part": None, "others": "", "in_image": False}}


@pytest.mark.parametrize("modules", [*_MODULES.values(), [torch_check], [tcp_linktest], [launcher]])
def test_what_boards_are_sent_is_for_an_older_python(modules: Sequence[ModuleType]) -> None:
    """JetPack 5's has to read it.  A board has none of flowspec's modules but those that are sent together."""
    for module in modules:
        tree = ast.parse(inspect.getsource(module), feature_version=(3, 8))
        imported = {name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
                    for name in ([str(node.module)] if isinstance(node, ast.ImportFrom) else
                                 [alias.name for alias in node.names])}
        may_import = {module.__name__ for module in modules} | sys.stdlib_module_names
        may_import |= {"torch", "numpy"} if module is torch_check else set()
        assert not {name for name in imported if not {name, name.partition(".")[0]} & may_import}


@pytest.mark.parametrize("section", ASKED)
def test_the_probe_is_a_program(section: str, tmp_path: Path) -> None:
    python = shutil.which("python3", path=os.defpath) or sys.executable
    done = subprocess.run([python, "-s", "-"], input=program(section, **ASKED[section]), capture_output=True,
                          cwd=tmp_path, env={"PATH": os.defpath}, text=True, check=True)
    told = json.loads(done.stdout)
    begun = told["time"]
    assert parse(told, begun, begun + told["seconds"] + 1).ahead == pytest.approx(-0.5, abs=0.01)
    wanted = {"service": BoardStatus, "system": SystemFacts, "deployment": BoardFacts}[section]
    assert told[section].keys() <= {field.name for field in fields(wanted)}


@pytest.mark.parametrize("answer", [
    {}, {"time": "now", "seconds": 0}, {"time": 0, "seconds": 0, "service": {"current": {"id": 1}}},
    {"time": 0, "seconds": 0, "system": {"disks": []}}, {"time": 0, "seconds": 0, "deployment": {"units": 3}},
    {"time": 0, "seconds": 0, "system": {"torch": {"cuda": [8]}}}])
def test_an_answer_that_is_none_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        parse(answer, 0.0, 1.0)


def test_files_by_pattern(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for zone in ("0", "12"):
        (tmp_path / f"thermal_zone{zone}").mkdir()
        (tmp_path / f"thermal_zone{zone}/temp").write_text(f"{zone}000\n")
    place = str(tmp_path)[1:]
    monkeypatch.setattr(system, "FILES", (f"{place}/thermal_zone*/temp", "no/such/file"))
    assert system.files() == {f"{place}/thermal_zone0/temp": "0000\n",
                              f"{place}/thermal_zone12/temp": "12000\n", "no/such/file": ""}
