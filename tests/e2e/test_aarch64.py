"""On the boards' instruction set, with JetPack 6's PyTorch and the oldest of everything else."""

from __future__ import annotations

import sys

import aarch64kit
import fleetkit
import imagekit
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Every program is emulated, and importing torch alone takes half a minute: a few of each kind.
SMOKE = ("tests/tree", "tests/transport/test_codec.py",
         "tests/stage/quant/test_quant.py::test_a_linear_multiplies_by_what_is_stored",
         "tests/runtime/cluster/test_process_cluster.py::test_greedy_text_is_that_of_transformers[flowspec]")
PATIENCE = 3000.0  # seconds


@pytest.mark.aarch64
@fleetkit.needs("aarch64 programs", aarch64kit.why_no_aarch64())
def test_the_smoke_of_the_tests() -> None:
    machine = aarch64kit.run(["python3", "-c", "import platform; print(platform.machine())"], PATIENCE)
    assert machine.stdout.strip() == "aarch64"
    # Examples may take as long as they like; there is neither a GPU nor bitsandbytes.
    done = aarch64kit.run(["python3", "-m", "pytest", "-p", "no:cacheprovider", "--hypothesis-profile=ci",
                           "--durations=10", "-k", "not cuda and not nf4 and not fp4", *SMOKE], PATIENCE)
    print(done.stdout)
    assert done.returncode == 0
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_what_it_installs_is_the_oldest_that_is_allowed() -> None:
    """uv writes the list with the lowest versions: where pyproject.toml changes, it is made anew."""
    project = tomllib.loads((imagekit.REPOSITORY / "pyproject.toml").read_text())["project"]
    listed = dict(line.split("==") for line in aarch64kit.BOARD.wheels)
    floors = {need.name: need.specifier for need in map(Requirement, project["dependencies"])}
    del floors["torch"]  # what JetPack 6 has, not the oldest
    del floors["tomli"]  # for Python 3.10 alone
    oldest = {name: next(clause.version for clause in floor if clause.operator == ">=")
              for name, floor in floors.items()}
    assert {name: Version(listed[name]) for name in oldest} == {
        name: Version(version) for name, version in oldest.items()}
