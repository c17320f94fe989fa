"""Profiles as TOML: round trips of any content."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec_edge.config import Conditions, load_profile, profile_names
from flowspec_edge.fleet.profiling.profile_toml import render

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"]), max_size=300)
WORDS = st.lists(st.sampled_from(["layers", 'say "so"', "back\\slash", "a" * 130, "é", "", "\t", '"""']),
                 max_size=60).map(" ".join)


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_comes_back(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    text = render(profile)
    path = tmp_path / "again.toml"
    path.write_text(text, encoding="utf-8")
    assert load_profile(str(path)) == profile
    assert max(map(len, text.splitlines()[:-1])) <= 200


@settings(max_examples=50)
@given(source=TEXT | WORDS, machine=TEXT, clocks=st.dictionaries(TEXT, st.floats(0, 1e6), max_size=3))
def test_any_text_comes_back(source: str, machine: str, clocks: dict[str, float]) -> None:
    conditions = Conditions(machine=machine, clocks_mhz=clocks, temperature_c=41.5, threads=2)
    profile = load_profile("paper-7b").model_copy(update={"source": source, "conditions": conditions})
    data = tomllib.loads(render(profile))
    assert data["source"] == source
    assert data["conditions"].get("machine", "") == machine
    assert data["conditions"].get("clocks_mhz", {}) == clocks
