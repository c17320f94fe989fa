"""The script that sets a power mode, over tools that answer as nvpmodel does, and modes by their names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flowspec_edge.boards.deploy.steps.power import power_script
from flowspec_edge.boards.probe.board import mode_numbers

MODES = """\
# comments name < POWER_MODEL > too
< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
<POWER_MODEL ID=12 NAME=MAXN_SUPER>
< PM_CONFIG DEFAULT=0 >
"""


def set_mode(directory: Path, mode: str, sets: str) -> tuple[int, str, str]:
    """The script's exit code, its last words, and the number that is set; ``sets``: what nvpmodel -m does."""
    (directory / "nvpmodel.conf").write_text(MODES)
    (directory / "mode").write_text("0\n")
    tool = directory / "nvpmodel"
    tool.write_text("#!/bin/sh\ncd " + str(directory) + "\n"
                    f'[ "$1" != -q ] || {{ echo "NV Power Mode: some"; exec cat mode; }}\n{sets}\n')
    tool.chmod(0o755)
    script = power_script(mode).replace("/etc/nvpmodel.conf", f"{directory}/nvpmodel.conf")
    done = subprocess.run(["sh", "-e"], input=script, capture_output=True, text=True, check=False,
                          env={"PATH": f"{directory}:/usr/bin:/bin"})
    return done.returncode, done.stderr.strip().rpartition("\n")[2], (directory / "mode").read_text().strip()


@pytest.mark.parametrize("sets", ["echo $2 > mode", "echo $2 > mode; exit 1"])
def test_a_mode_is_set_by_its_name(sets: str, tmp_path: Path) -> None:
    """To the number that the probe, with a reader of its own, finds in the configuration."""
    numbers = mode_numbers(MODES)
    assert numbers == {"15W": "0", "MAXN_SUPER": "12"}
    for mode, number in numbers.items():
        assert set_mode(tmp_path, mode, sets) == (0, "", number)


@pytest.mark.parametrize("sets", ["exit 0", "echo NVPM ERROR: declined >&2; exit 1"])
def test_a_mode_that_takes_a_reboot_says_so(sets: str, tmp_path: Path) -> None:
    code, said, number = set_mode(tmp_path, "MAXN_SUPER", sets)
    assert (code, number) == (1, "0")
    assert said == "this change takes a reboot: run nvpmodel -m 12 there, and confirm it"


def test_a_mode_that_the_board_has_not(tmp_path: Path) -> None:
    code, said, _ = set_mode(tmp_path, "MAXN", "echo $2 > mode")
    assert (code, said.endswith("nvpmodel.conf knows no MAXN")) == (1, True)
