"""The unit files, by systemd's own judgement."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from kits import network_beds

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.release import in_image
from flowspec_edge.util.resources import resource_dir

UNITS = resource_dir("deploy") / "units"
# Without what these name, a verification under a root of its own says that it is missing.
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "multi-user")

needs_systemd = network_beds.needs(
    "systemd-analyze", "" if shutil.which("systemd-analyze") else "not installed (Debian package systemd)")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """As much of a board as the units name."""
    units = tmp_path / paths.UNITS.lstrip("/")
    shutil.copytree(UNITS, units)
    (tmp_path / "bin").mkdir()
    for name in ("sh", "cp", "rm"):
        shutil.copy(f"/bin/{name}", tmp_path / "bin")
    for target in TARGETS:
        (units / f"{target}.target").write_text("[Unit]\n")
    program = tmp_path / paths.PYTHON.lstrip("/").replace("python", "flowspec")
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


def analyze(root: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(["systemd-analyze", *arguments[:1], f"--root={root}", *arguments[1:]],
                          capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@needs_systemd
@pytest.mark.parametrize(("unit", "image"), [
    (paths.DRAFT_UNIT, False), (paths.VERIFY_UNIT, False), (paths.DRAFT_UNIT, True), (paths.VERIFY_UNIT, True),
    (paths.POWER_UNIT, False)])
def test_systemd_finds_no_fault_and_an_exposure_of_at_most_four(root: Path, unit: str, image: bool) -> None:
    units, name = root / paths.UNITS.lstrip("/"), unit.replace("@", "@1")
    if image:
        (units / unit).write_text(in_image((units / unit).read_text()))
        (units / "docker.service").write_text("[Service]\nExecStart=/bin/sh\n")
    assert analyze(root, "verify", name) == (0, "")
    if unit != paths.POWER_UNIT:
        code, said = analyze(root, "security", "--offline=yes", "--threshold=40", "--no-pager", name)
        assert code == 0, said


@needs_systemd
def test_systemd_would_find_one(root: Path) -> None:
    """An unknown key is a warning alone, and so is a program that is not there no more."""
    file = root / paths.UNITS.lstrip("/") / paths.DRAFT_UNIT
    file.write_text(file.read_text().replace("WatchdogSec", "WatchdogSecs"))
    assert "Unknown key 'WatchdogSecs'" in analyze(root, "verify", paths.DRAFT_UNIT)[1]
    (root / paths.CURRENT.lstrip("/") / "venv/bin/flowspec").unlink()
    assert "is not executable" in analyze(root, "verify", paths.verify_unit(1))[1]


def test_the_units_name_the_places_that_deploy_fills() -> None:
    draft, verify = ((UNITS / name).read_text() for name in (paths.DRAFT_UNIT, paths.VERIFY_UNIT))
    program = paths.PYTHON.replace("python", "flowspec")
    assert f"\nExecStart={program} draft --config {paths.CURRENT}/etc/draft.toml --key-file " in draft
    assert f"\nExecStart={program} worker --config {paths.CURRENT}/etc/verify-%i.toml --key-file " in verify
    for unit in (draft, verify):
        assert f"\nUser={paths.USER}\n" in unit
        assert f"\nLoadCredential=curve:{paths.KEY}\n" in unit
    assert f"\nLoadCredential=api:{paths.API_KEY}\n" in draft
    shared = ["TimeoutStartSec", "WatchdogSec", "ExecStart", "Description", "LoadCredential=api",
              "SetCredential"]
    kept = [[line for line in unit.replace("draft.toml", "verify-%i.toml").splitlines()
             if "=" in line and not line.startswith(("#", *shared))]
            for unit in (draft, verify)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("role", ["draft", "verify-1"])
@pytest.mark.parametrize(("result", "mark", "now"), [
    ("exit-code", True, "new"), ("timeout", True, "new"), ("exit-code", False, "old"),
    ("success", True, "old")])
@pytest.mark.parametrize(("began", "other"), [("old", ""), ("new", ""), ("old", "verify-2")])
def test_a_failing_release_gives_way_during_a_rollout(
        tmp_path: Path, role: str, result: str, mark: bool, now: str, began: str, other: str) -> None:
    """Where the board has the same role there, and the process was of the release that is current."""
    unit = (UNITS / (paths.DRAFT_UNIT if role == "draft" else paths.VERIFY_UNIT)).read_text()
    [line] = [line for line in unit.replace("\\\n", "").splitlines() if line.startswith("ExecStopPost=+")]
    command = shlex.split(line.removeprefix("ExecStopPost=+").replace("$$", "$").replace("%i", "1").replace(
        paths.HOME, str(tmp_path)).replace("/run/%n", str(tmp_path / "began")))
    for release, named in (("old", role), ("new", other or role)):
        (tmp_path / release / "etc").mkdir(parents=True)
        (tmp_path / release / "etc" / f"{named}.toml").touch()
    for link, release in (("current", "old"), ("previous", "new"), ("began", began)):
        (tmp_path / link).symlink_to(release)
    if mark:
        (tmp_path / "unsettled").touch()
    subprocess.run(command, env={**os.environ, "SERVICE_RESULT": result}, check=True)
    now = now if began == "old" and not other else "old"
    links = {name: os.readlink(tmp_path / name) for name in ("current", "previous")}
    assert links == {"current": now, "previous": "old" if now == "new" else "new"}
    assert not [*tmp_path.glob("*.new")]


@pytest.mark.parametrize("name", [paths.DRAFT_UNIT, paths.VERIFY_UNIT])
def test_the_gpu_is_within_reach(name: str) -> None:
    """Of the draft device, too: nothing that hides /dev, filters devices, or forbids what CUDA does."""
    keys = {line.partition("=")[0] for line in (UNITS / name).read_text().splitlines() if "=" in line}
    assert not keys & {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock",
                       "MemoryDenyWriteExecute", "ProtectKernelTunables", "SupplementaryGroups", "ProcSubset"}
    assert "CUDA_CACHE_PATH" in (UNITS / name).read_text()
