"""The chaos run: a few kinds of faults here, each once and a thousand in all in `make soak`; and that it
would tell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from kits import network_beds

from flowspec_edge.sampling.rule import Sampling
from tests.chaos.clients import Question, Violation, compare
from tests.chaos.faults import able, build_clock
from tests.chaos.processes import Holdings
from tests.chaos.run import chaos
from tests.chaos.schedule import LINKS, LOCAL, SETUPS, Setup, schedule

LONG = 1000
EVERYWHERE = {*LOCAL, *LINKS}
# What strikes a stage, D0 and the machine, without another start of the server or of its fork server.
QUICK = ("kill", "stop_continue", "draft_stop_continue", "disk_full", "clock_back", "memory_limit")
FEW = (replace(SETUPS[0], stages=2, share=len(QUICK), kinds=tuple((kind, 1) for kind in QUICK)),)
# A server of each place.
SMALL = (replace(SETUPS[0], stages=2, share=len(LOCAL)),
         replace(SETUPS[-1], stages=1, share=2, kinds=(("link_cut", 1), ("link_slow", 1))))


def written(name: str) -> Path:
    return Path(os.environ.get("FLOWSPEC_CHAOS_REPORT") or f"build/{name}.json")


def test_the_same_seed_gives_the_same_faults() -> None:
    assert schedule(1, LONG, EVERYWHERE) == schedule(1, LONG, EVERYWHERE) != schedule(2, LONG, EVERYWHERE)


@pytest.mark.parametrize("faults", [LONG, 150])
def test_every_kind_comes_and_nothing_that_the_machine_cannot(faults: int) -> None:
    episodes = schedule(1, faults, EVERYWHERE - {"disk_full"})
    kinds = Counter(fault.kind for episode in episodes for fault in episode.faults)
    assert sum(kinds.values()) == faults
    assert set(kinds) == EVERYWHERE - {"disk_full"}
    assert {episode.setup for episode in episodes} == {*SETUPS}


@network_beds.needs("every kind of fault", ", ".join(EVERYWHERE - able()))
def test_this_machine_can_do_it_all() -> None:
    assert able() >= EVERYWHERE


@network_beds.needs("a compiler", "" if shutil.which("gcc") else "no gcc")
def test_the_wall_clock_of_one_process_is_set_back(tmp_path: Path) -> None:
    shim = build_clock(tmp_path)
    (tmp_path / "offset").write_bytes((-(10**9)).to_bytes(8, sys.byteorder, signed=True))
    environment = {**os.environ, "LD_PRELOAD": str(shim), "CHAOS_CLOCK": str(tmp_path / "offset")}
    said = subprocess.run([sys.executable, "-c", "import time; print(time.time() < 1e9 < time.time() + 1e9)"],
                          env=environment,
                          capture_output=True, text=True, check=True).stdout
    assert said == "True\n"


@pytest.mark.parametrize(("tokens", "text", "finish"), [
    ([1, 3], "ab", "length"), ([1], "a", "length"), ([1, 2], "ac", "length"), ([1, 2], "ab", "stop")])
def test_another_answer_than_plain_decodings_is_told(tokens: list[int], text: str, finish: str) -> None:
    question = Question("", Sampling(), (1, 2), "length", "ab")
    compare(question, "flowspec", [1, 2], "ab", "length")
    with pytest.raises(Violation, match="plain decoding gives"):
        compare(question, "flowspec", tokens, text, finish)


def test_what_a_server_gained_is_told() -> None:
    before = Holdings(7, 20, 156, 12, 400.0, 300.0)
    assert replace(before, descriptors=159, stage_mib=352.5).growth(before) == {
        "processes": 0, "threads": 0, "descriptors": 3, "files": 0, "draft_mib": 0, "stage_mib": 52.5}


@pytest.mark.slow
@pytest.mark.parametrize("setups", [FEW, pytest.param(SMALL, marks=pytest.mark.soak)], ids=["few", "all"])
def test_faults_of_many_kinds(short_tmp_path: Path, setups: tuple[Setup, ...]) -> None:
    if network_beds.why_no_bed():
        setups = setups[:1]
    faults = sum(len(setup.kinds) for setup in setups)
    report = chaos(1, faults, short_tmp_path, written("chaos-small"), setups=setups, prompts=2, tokens=(4, 8),
                   longest_s=2.0)
    print(report.text())
    assert report.violations == []
    assert set(report.recovery) == able() & {kind for setup in setups for kind, _ in setup.kinds}


@pytest.mark.soak
def test_a_thousand_faults(short_tmp_path: Path) -> None:
    report = chaos(1, LONG, short_tmp_path, written("chaos"))
    print(report.text())
    assert report.violations == []
