"""The unit files, by systemd's own judgement."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import fleetkit
import pytest

from flowspec_edge.fleet import places
from flowspec_edge.resources import resource_dir

UNITS = resource_dir("deploy") / "units"
# Without what these name, a verification under a root of its own says that it is missing.
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "multi-user")

needs_systemd = fleetkit.needs(
    "systemd-analyze", "" if shutil.which("systemd-analyze") else "not installed (Debian package systemd)")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """As much of a board as the units name."""
    units = tmp_path / places.UNITS.lstrip("/")
    shutil.copytree(UNITS, units)
    for target in TARGETS:
        (units / f"{target}.target").write_text("[Unit]\n")
    program = tmp_path / places.PYTHON.lstrip("/").replace("python", "flowspec")
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


def analyze(root: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(["systemd-analyze", *arguments[:1], f"--root={root}", *arguments[1:]],
                          capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@needs_systemd
@pytest.mark.parametrize("unit", [places.DRAFT_UNIT, places.verify_unit(1)])
def test_systemd_finds_no_fault(root: Path, unit: str) -> None:
    assert analyze(root, "verify", unit) == (0, "")


@needs_systemd
def test_systemd_would_find_one(root: Path) -> None:
    """An unknown key is a warning alone, and so is a program that is not there no more."""
    file = root / places.UNITS.lstrip("/") / places.DRAFT_UNIT
    file.write_text(file.read_text().replace("WatchdogSec", "WatchdogSecs"))
    assert "Unknown key 'WatchdogSecs'" in analyze(root, "verify", places.DRAFT_UNIT)[1]
    (root / places.CURRENT.lstrip("/") / "venv/bin/flowspec").unlink()
    assert "is not executable" in analyze(root, "verify", places.verify_unit(1))[1]


@needs_systemd
@pytest.mark.parametrize("unit", [places.DRAFT_UNIT, places.verify_unit(1)])
def test_the_exposure_is_at_most_four(root: Path, unit: str) -> None:
    code, said = analyze(root, "security", "--offline=yes", "--threshold=40", "--no-pager", unit)
    assert code == 0, said


def test_the_units_name_the_places_that_deploy_fills() -> None:
    draft, verify = ((UNITS / name).read_text() for name in (places.DRAFT_UNIT, places.VERIFY_UNIT))
    program = places.PYTHON.replace("python", "flowspec")
    assert f"\nExecStart={program} draft --config {places.CURRENT}/etc/draft.toml --key-file " in draft
    assert f"\nExecStart={program} worker --config {places.CURRENT}/etc/verify-%i.toml --key-file " in verify
    for unit in (draft, verify):
        assert f"\nUser={places.USER}\n" in unit
        assert f"\nLoadCredential=curve:{places.KEY}\n" in unit
    assert f"\nLoadCredential=api:{places.API_KEY}\n" in draft
    shared = ["TimeoutStartSec", "WatchdogSec", "ExecStart", "Description", "LoadCredential=api",
              "SetCredential"]
    kept = [[line for line in unit.splitlines() if "=" in line and not line.startswith(("#", *shared))]
            for unit in (draft, verify)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", [places.DRAFT_UNIT, places.VERIFY_UNIT])
def test_the_gpu_is_within_reach(name: str) -> None:
    """Of the draft device, too: nothing that hides /dev, filters devices, or forbids what CUDA does."""
    keys = {line.partition("=")[0] for line in (UNITS / name).read_text().splitlines() if "=" in line}
    assert not keys & {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock",
                       "MemoryDenyWriteExecute", "ProtectKernelTunables", "SupplementaryGroups", "ProcSubset"}
    assert "CUDA_CACHE_PATH" in (UNITS / name).read_text()
