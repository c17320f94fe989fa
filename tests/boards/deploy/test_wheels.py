"""Which wheels a board gets, from small wheels made here; pip is asked where it must not be."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flowspec_edge.boards.deploy.wheels import WheelTarget, build_wheel, environment, fill
from flowspec_edge.boards.probe.facts import system_facts
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.util.resources import resource_dir

BOARD = WheelTarget("3.10", "aarch64", "2.7.0")
DESKTOP = WheelTarget("3.12", "x86_64", "2.13.0+cpu")
PIP = "pip-99.0-py3-none-any.whl"


def wheel(house: Path, file: str) -> Path:
    """A wheel with nothing in it but its name."""
    name, version = file.split("-")[:2]
    with zipfile.ZipFile(house / file, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA",
                         f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return house / file


def lines(file: str) -> list[Requirement]:
    text = (resource_dir("deploy") / file).read_text()
    return [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]


def locked(python: str) -> dict[str, str]:
    """Name → version in the boards' lock."""
    return {need.name: str(need.specifier).removeprefix("==") for need in lines("boards.txt")
            if need.marker is None or need.marker.evaluate(
                {"python_version": python, "python_full_version": f"{python}.0"})}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Complete for BOARD, and with what others need, too."""
    wheel(tmp_path, "flowspec_edge-0.1.0-py3-none-any.whl")
    wheel(tmp_path, PIP)
    for name, version in locked("3.10").items():
        tags = {"msgpack": "cp310-cp310-manylinux2014_aarch64.manylinux_2_17_aarch64",
                "llguidance": "cp39-abi3-manylinux_2_31_aarch64"}.get(name, "py3-none-any")
        if name != "bitsandbytes":
            wheel(tmp_path, f"{name.replace('-', '_')}-{version}-{tags}.whl")
    wheel(tmp_path, f"msgpack-{locked('3.10')['msgpack']}-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl")
    wheel(tmp_path, "msgpack-1.0.0-cp310-cp310-manylinux2014_aarch64.whl")
    wheel(tmp_path, "torch-2.7.0-cp310-cp310-manylinux_2_28_aarch64.whl")
    return tmp_path


def names(wheels: Iterable[str]) -> set[str]:
    return {name.split("-")[0].replace("_", "-") for name in wheels}


EVERY = {"flowspec-edge", "pip"} | locked("3.10").keys() - {"bitsandbytes"}


def test_wheels_fit_python_and_machine_without_torch(house: Path) -> None:
    found = environment(house, BOARD, "/usr/bin/python3.10")
    assert names(found.wheels) == EVERY
    [msgpack] = [name for name in found.wheels if name.startswith("msgpack")]
    assert "-cp310-cp310-manylinux2014_aarch64" in msgpack
    assert locked("3.10")["msgpack"] in msgpack  # not the other one that would run there
    assert (found.wheelhouse, found.python) == (str(house), "/usr/bin/python3.10")
    # Another Python needs a newer typer, which is not here.
    with pytest.raises(UsageError, match=r"for Python 3.12 on x86_64: .*; run it with a network"):
        environment(house, DESKTOP)


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    """Which all tests run with."""
    tested = {(need.name, str(need.specifier)) for need in lines("constraints.txt")}
    assert {(need.name, str(need.specifier)) for need in lines("boards.txt")} <= tested


def test_the_lock_is_all_that_this_package_requires_but_torch() -> None:
    """The oracle is what the installed packages say of themselves, for this interpreter."""
    open_needs, required = [Requirement("flowspec-edge[grammar,int4]")], {"flowspec-edge"}
    while open_needs:
        need = open_needs.pop()
        for line in distribution(need.name).requires or ():
            inner = Requirement(line)
            holds = inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in ("", *need.extras))
            name = canonicalize_name(inner.name)
            if holds and name != "torch" and (name not in required or inner.extras):
                required.add(name)
                open_needs.append(inner)
    python = ".".join(map(str, sys.version_info[:2]))
    assert required - {"flowspec-edge"} == {canonicalize_name(name) for name in locked(python)}


def test_the_digest_is_of_the_contents_and_of_torch(house: Path) -> None:
    before = environment(house, BOARD)
    assert environment(house, BOARD) == before
    assert environment(house, WheelTarget("3.10", "aarch64", "2.8.0")).digest != before.digest
    assert environment(house, WheelTarget("3.10", "aarch64", "2.7.0", build="other")).digest != before.digest
    with zipfile.ZipFile(house / "flowspec_edge-0.1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("flowspec_edge/new.py", "")
    after = environment(house, BOARD)
    assert [*after.wheels] == [*before.wheels]
    assert after.digest != before.digest


def test_the_kind_of_a_board_by_its_facts() -> None:
    told = {"python": [3, 10, 12], "machine": "aarch64", "torch": {"version": "2.8.0", "build": "b"},
            "files": {"etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 1"}}
    facts = system_facts(told)
    assert WheelTarget.from_facts(facts, "nf4") == WheelTarget("3.10", "aarch64", "2.8.0", "b", l4t=True,
                                                               four_bit=True)
    assert WheelTarget.from_facts(facts, "fp4").four_bit
    plain = system_facts({**told, "files": {}})
    assert WheelTarget.from_facts(plain, "int4") == WheelTarget("3.10", "aarch64", "2.8.0", "b")


def test_bitsandbytes_goes_where_weights_need_it(house: Path) -> None:
    """A Jetson takes one that was built for it, by its tag, and never the package index's."""
    jetson, server = (WheelTarget("3.10", "aarch64", "2.7.0", l4t=l4t, four_bit=True)
                      for l4t in (True, False))
    version = locked("3.10")["bitsandbytes"]
    wheel(house, f"bitsandbytes-{version}-py3-none-manylinux_2_24_aarch64.whl")
    assert names(environment(house, server).wheels) == {*EVERY, "bitsandbytes"}
    assert names(environment(house, BOARD).wheels) == EVERY
    for ask in (environment, lambda house, target: fill(house, [target])):
        with pytest.raises(UsageError, match=r"built for a Jetson's GPU: build it .* Dockerfile\.jetson .*"
                                             rf"bitsandbytes-{version}-…-linux_aarch64\.whl.*int4"):
            ask(house, jetson)
    wheel(house, f"bitsandbytes-{version}-py3-none-linux_aarch64.whl")
    assert f"bitsandbytes-{version}-py3-none-linux_aarch64.whl" in environment(house, jetson).wheels


def test_a_full_wheelhouse_needs_no_network(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    told: list[str] = []
    before = sorted(house.iterdir())
    fill(house, [BOARD, BOARD], told.append)
    assert told == []
    assert sorted(house.iterdir()) == before


def test_what_is_missing_comes_by_pip_from_wherever_pip_is_told(house: Path, monkeypatch: pytest.MonkeyPatch
                                                                ) -> None:
    (elsewhere := house / "elsewhere").mkdir()
    for name, value in (("CONFIG_FILE", "/dev/null"), ("NO_INDEX", "1"), ("FIND_LINKS", str(elsewhere))):
        monkeypatch.setenv(f"PIP_{name}", value)
    (typer,) = house.glob("typer-*")
    typer.rename(elsewhere / typer.name)
    told: list[str] = []
    fill(house, [BOARD], told.append)
    assert told == ["Python 3.10 on aarch64: getting 1 packages"]
    assert names(environment(house, BOARD).wheels) == EVERY
    (elsewhere / typer.name).unlink()
    typer.unlink()
    with pytest.raises(FlowspecError, match=r"pip cannot download the wheels for Python 3.10 on aar.*typer"):
        fill(house, [BOARD])


def test_half_a_wheel_is_named(house: Path) -> None:
    (typer,) = house.glob("typer-*")
    typer.write_bytes(typer.read_bytes()[:40])
    with pytest.raises(FlowspecError, match=rf"{typer.name} is damaged: remove it"):
        environment(house, BOARD)


def test_a_file_that_is_named_like_no_wheel_is_named(house: Path) -> None:
    (house / "typer.whl").touch()
    with pytest.raises(UsageError, match=r"typer\.whl: this is no wheel.s name: remove it"):
        environment(house, BOARD)


def test_a_wheelhouse_that_cannot_be_written_to_is_named(house: Path) -> None:
    (taken := house / "taken").touch()
    for place in (taken, taken / "below"):
        with pytest.raises(FlowspecError, match=rf"cannot write this flowspec's wheel into {place}: "):
            build_wheel(place)


def test_a_wheelhouse_without_this_package_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no wheel of flowspec-edge"):
        environment(tmp_path, BOARD)
