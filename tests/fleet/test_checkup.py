"""A board's check-up: systems as files describe them, this machine's own libraries, and broken ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from flowspec_edge.fleet.checkup import Finding, check_system, check_time
from flowspec_edge.fleet.checkup_compute import Libraries, check_compute, check_gpu, check_kernels
from flowspec_edge.fleet.kernel_trial import Trial

ORIN = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=25W >\n"
                         "< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n",
    "var/lib/nvpmodel/status": "pmode:0002 fmode:quiet",
    "proc/meminfo": "MemTotal:        7802680 kB\nMemAvailable:    6812340 kB\n",
    "proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n",
    "sys/class/thermal/thermal_zone0/temp": "51250\n",
    "etc/group": f"root:x:0:\nvideo:x:{os.getgid()}:\nrender:x:{os.getgid()}:\n",
}


def found(root: Path, changes: dict[str, str] | None = None, power_mode: str = "") -> dict[str, Finding]:
    for name, text in (ORIN | (changes or {})).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {finding.check: finding for finding in check_system(root, root, power_mode)}


def test_a_board_as_it_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 10**12))
    findings = found(tmp_path)
    assert {name for name, finding in findings.items() if finding.state != "ok"} == set()
    assert findings["board"].found == "NVIDIA Jetson Orin Nano Developer Kit, L4T 36.4.3 (JetPack 6.1 or 6.2)"
    assert findings["memory"].found == "7.0 of 8.0 GB available"
    assert findings["power mode"].found == "MAXN_SUPER"
    assert not any(finding.advice for finding in findings.values())


@pytest.mark.parametrize(("changes", "check", "state", "says", "advice"), [
    ({"etc/nv_tegra_release": "# R35 (release), REVISION: 4.1\n"}, "board", "failed", "older than 3.10",
     "JetPack 6"),
    ({"etc/nv_tegra_release": "# R41 (release), REVISION: 1.0\n"}, "board", "warning", "L4T 41.1.0", "go on"),
    ({"proc/meminfo": "MemTotal: 7802680 kB\nMemAvailable: 3000000 kB\n"}, "memory", "warning", "3.1 of 8.0",
     "multi-user.target"),
    ({"proc/meminfo": "nothing\n"}, "memory", "unknown", "does not say", ""),
    ({"proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 2097152 0 5\n"
                    "/dev/zram1 partition 2097152 0 5\n"}, "swap", "warning",
     "4.3 GB in /dev/zram0, /dev/zram1", "nvzramconfig"),
    ({"proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 2097152 0 5\n"
                    "/data/swap file 8388604 0 -2\n"}, "swap", "ok", "10.7 GB", ""),
    ({"sys/class/thermal/thermal_zone0/temp": "83000\n"}, "temperature", "warning", "83 °C", "fan"),
    ({"sys/class/thermal/thermal_zone0/temp": "97500\n"}, "temperature", "failed", "98 °C", "cool"),
    ({"var/lib/nvpmodel/status": "pmode:0001"}, "power mode", "warning", "25W, and there is MAXN_SUPER",
     "nvpmodel -m 2"),
    ({"var/lib/nvpmodel/status": ""}, "power mode", "unknown", "does not say", "nvpmodel -q"),
])
def test_what_is_not_so_has_a_next_step(tmp_path: Path, changes: dict[str, str], check: str, state: str,
                                        says: str, advice: str) -> None:
    finding = found(tmp_path, changes)[check]
    assert (finding.state, says in finding.found, advice in finding.advice) == (state, True, True), finding
    assert bool(finding.advice) == bool(advice)


def test_a_user_without_the_gpus_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    groups = {"etc/group": f"video:x:{os.getgid()}:\nrender:x:4999:\n"}
    finding = found(tmp_path, groups)["groups"]
    assert (finding.state, finding.found) == ("failed", "this user is not in render")
    assert finding.advice.startswith("sudo usermod -aG render ")


@pytest.mark.parametrize(("wanted", "state", "says", "remedy"), [
    ("MAXN_SUPER", "ok", "MAXN_SUPER", ()),
    ("25W", "warning", "MAXN_SUPER, and 25W is asked for", ("nvpmodel", "-m", "1")),
    ("60W", "failed", "60W is asked for, and there is only 15W, 25W, MAXN_SUPER", ()),
])
def test_a_power_mode_that_is_asked_for(tmp_path: Path, wanted: str, state: str, says: str,
                                        remedy: tuple[str, ...]) -> None:
    finding = found(tmp_path, power_mode=wanted)["power mode"]
    assert (finding.state, finding.found) == (state, says)
    assert (finding.remedy[0] if finding.remedy else ()) == remedy


def test_a_machine_without_power_modes_cannot_have_one(tmp_path: Path) -> None:
    finding = next(f for f in check_system(tmp_path, tmp_path, "25W") if f.check == "power mode")
    assert finding.state == "failed"
    assert finding.found == "25W is asked for, and there is no /etc/nvpmodel.conf"


@pytest.mark.parametrize(("told", "state", "says"), [
    ("CanNTP=yes\nNTP=yes\nNTPSynchronized=yes\n", "ok", "by NTP"),
    ("CanNTP=yes\nNTP=yes\nNTPSynchronized=no\n", "warning", "no server has answered"),
    ("CanNTP=yes\nNTP=no\nNTPSynchronized=no\n", "warning", "NTP is off"),
    ("CanNTP=no\nNTP=no\n", "warning", "there is nothing"),
    ("", "unknown", "does not say"),
])
def test_who_keeps_the_clock_right(told: str, state: str, says: str) -> None:
    finding = check_time(told)
    assert (finding.state, says in finding.found) == (state, True)
    assert finding.remedy == ((("timedatectl", "set-ntp", "true"),) if "off" in says else ())


def test_only_a_jetson_is_asked_what_only_a_jetson_has(tmp_path: Path) -> None:
    findings = {finding.check for finding in check_system(tmp_path, tmp_path)}
    assert "board" in findings
    assert not findings & {"power mode", "groups"}


def test_a_full_disk_and_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12, 10**9))
    assert found(tmp_path)["disk"].state == "warning"
    monkeypatch.undo()
    missing = {f.check: f for f in check_system(tmp_path, tmp_path / "nowhere")}["disk"]
    assert (missing.state, "No such file" in missing.found) == ("failed", True)


def test_this_machines_libraries_do_real_products() -> None:
    findings = {finding.check: finding for finding in check_compute(jetson=False)}
    assert {name: finding.state for name, finding in findings.items()} == dict.fromkeys(
        ("torch", "gpu", "product", "4 bits", "encryption"), "ok"), findings


@pytest.mark.soak  # test_kernels has what becomes of the process that asks such a library
def test_a_library_that_ends_the_process_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                      ) -> None:
    """As on a board: bitsandbytes that dies at its first kernel is one, for int4 works without it."""
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path.cwd()}")
    four = {finding.check: finding for finding in check_compute(jetson=False)}["4 bits"]
    assert (four.state, "int4 works; nf4 does not" in four.found) == ("warning", True), four
    assert four.advice == ("shard models in int4, which needs no bitsandbytes, or install bitsandbytes 0.49 "
                           "or newer")


def test_a_library_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path.cwd()}")
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    torch, _ = check_compute(jetson=True)
    assert (torch.check, torch.state, "libcudart.so.12" in torch.found) == ("torch", "failed", True)


@pytest.mark.parametrize(("built_for", "gpu", "jetson", "state", "says"), [
    ("12.6", "Orin", True, "ok", "Orin, CUDA 12.6"),
    (None, None, True, "failed", "this torch was built without CUDA"),
    ("12.6", None, True, "failed", "torch, built for CUDA 12.6, sees no GPU"),
    (None, None, False, "ok", "none: this machine computes on its CPU"),
])
def test_what_torch_says_of_a_gpu(built_for: str | None, gpu: str | None, jetson: bool, state: str, says: str
                                  ) -> None:
    finding = check_gpu(Libraries("2.7.0", "5.0.0", True, built_for, gpu), jetson)
    assert (finding.state, finding.found, bool(finding.advice)) == (state, says, state == "failed")


ORIN_GPU, THOR_GPU = (8, 7), (11, 0)


@pytest.mark.parametrize(("works", "capability", "state", "advice"), [
    (("int4", "nf4"), ORIN_GPU, "ok", ""),
    (("int4",), ORIN_GPU, "warning", "shard models in int4, which needs no bitsandbytes"),
    (("nf4",), ORIN_GPU, "warning", "shard models in fp16: on this GPU bitsandbytes expands the whole"),
    ((), ORIN_GPU, "warning", "shard models in fp16"),
    (("nf4",), THOR_GPU, "warning", "shard models in nf4"),
    (("int4",), THOR_GPU, "warning", "shard models in int4, which needs no bitsandbytes, or build"),
    ((), THOR_GPU, "warning", "shard models in fp16, or build bitsandbytes for this GPU: cmake"),
    (("nf4",), None, "warning", "shard models in nf4"),
])
def test_the_4_bit_kind_that_is_advised(works: tuple[str, ...], capability: tuple[int, int] | None,
                                        state: str, advice: str) -> None:
    """Never nf4 for an Orin."""
    trials = [Trial("fp16", True, "", 1e-4),
              *(Trial(kind, kind in works, "" if kind in works else "no kernel image")
                for kind in ("int4", "nf4"))]
    product, four = check_kernels(trials, capability)
    assert (product.state, four.state) == ("ok", state)
    assert four.advice.startswith(advice)
    assert bool(four.advice) == bool(advice)
    assert all(f"{kind} works" in four.found or four.state == "ok" for kind in works)
    if capability == ORIN_GPU:
        assert "in nf4" not in four.advice
        assert "build" not in four.advice
