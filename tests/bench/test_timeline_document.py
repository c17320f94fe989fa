"""The timelines in docs/strategies.md equal the command's output, for every strategy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowspec_edge.bench.timeline import arguments, update_timelines
from flowspec_edge.cli.main import main
from flowspec_edge.strategies.registry import STRATEGIES

DOCUMENT = Path(__file__).parents[2] / "docs" / "strategies.md"


def test_every_strategy_has_a_section_with_a_timeline() -> None:
    text = DOCUMENT.read_text()
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == set(STRATEGIES)
    assert set(re.findall(r"<!-- timeline (\w+)", text)) == set(STRATEGIES)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_timelines_are_those_of_the_code(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """After an intended change of a schedule run: make timelines."""
    text = DOCUMENT.read_text()
    start = text.index(f"<!-- timeline {name}")
    section = text[start : text.index("```\n", text.index("```text\n", start) + 8) + 4]

    def draw(given: list[str]) -> str:
        assert main(["bench", "timeline", *given, "--max-new-tokens", "24"]) == 0
        return capsys.readouterr().out

    assert update_timelines(section, draw) == section


def test_options_follow_the_name_in_a_mark() -> None:
    assert arguments("megatron turns 40") == ["--strategy", "megatron", "--turns", "40"]
    text = "a\n<!-- timeline x -->\n```text\nold\n```\nb\n<!-- timeline y stages 2 -->\nc\n"
    drawn = update_timelines(text, lambda given: " ".join(given) + "\n")
    assert drawn == ("a\n<!-- timeline x -->\n```text\n--strategy x\n```\nb\n"
                     "<!-- timeline y stages 2 -->\n```text\n--strategy y --stages 2\n```\nc\n")
