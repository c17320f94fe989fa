"""The text timeline against the spans it was drawn from, column by column; those in the documents are
the command's output, for every strategy."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import pytest
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.cli.main import main
from flowspec_edge.d0.request import Request, Stats
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.clock import Span
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.timeline import WIDTH, arguments, draw, update_timelines, window
from flowspec_edge.strategies.registry import STRATEGIES

STAGES = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> VirtualCluster:
    model: Path = tiny_model_dir(tmp_path_factory.mktemp("model"), layers=3, hidden=32)
    return VirtualCluster(model, STAGES, load_profile("paper-7b"))


@cache  # the same request has the same spans
def run(cluster: VirtualCluster, strategy: str) -> tuple[list[Span], Stats]:
    stats = cluster.generate(Request([5, 9, 20], strategy, max_new_tokens=24)).stats
    return list(cluster.spans), stats


def lines_of(text: str) -> dict[str, str]:
    """The columns of each device, by its name."""
    return {line[:10].rstrip(): line[10:] for line in text.splitlines()[1:-1]}


def busy(spans: list[Span], left: float, right: float) -> float:
    return sum(max(0.0, min(s.end, right) - max(s.start, left)) for s in spans)


@pytest.mark.parametrize("strategy", ["flowspec", "chunk_pp", "autoregressive"])
@pytest.mark.parametrize(("turns", "skip"), [(12, 0), (5, 3), (30, 1)])
def test_columns_are_busy_when_the_devices_are(cluster: VirtualCluster, strategy: str, turns: int, skip: int
                                               ) -> None:
    spans, stats = run(cluster, strategy)
    view = window(stats.ttft_s, stats.ttft_s + stats.decode_s, stats.slot_s, turns, skip)
    text = draw(spans, STAGES, view, turns)
    assert max(map(len, text.splitlines())) <= WIDTH
    lines = lines_of(text)
    assert list(lines) == ["D0 draft", "D0 verify", "V1", "V2", "V3"]
    fine = next(n for n in range(8, 0, -1) if n * turns <= 90)
    step = stats.slot_s / fine
    columns = {len(line) for line in lines.values()}
    assert len(columns) == 1
    assert columns.pop() == math.ceil((view.end - view.start) / step - 1e-6)
    for name, line in lines.items():
        kind, device = {"D0 draft": ("draft", 0), "D0 verify": ("verify", 0)}.get(name, ("compute", None))
        mine = [s for s in spans if s.kind == kind and s.device == (int(name[1]) if device is None else 0)]
        for column, sign in enumerate(line):
            left = view.start + column * step
            share = busy(mine, left, left + step) / step
            if device == 0:
                assert (sign != ".") == (share > 1e-6), (name, column)
                assert sign in (".", kind[0])
            elif share > 0.999:
                assert sign != "."
            elif share < 0.001:
                assert sign == "."


def test_a_known_timeline() -> None:
    spans = [
        Span(0, "draft", 0.0, 0.26, -1, 10), Span(0, "verify", 0.55, 0.57, 7, 3),
        Span(1, "compute", 0.0, 1.0, 7, 16), Span(1, "compute", 1.0, 1.5, 128, 16, cancelled=True),
        Span(2, "compute", 1.06, 2.0, 7, 16), Span(2, "compute", 2.0, 9.0, 12345, 16),
        Span(1, "compute", 2.625, 2.75, 9, 1, cancelled=True),
    ]
    view = window(0.0, 3.0, 1.0, 11)
    assert draw(spans, 2, view, 11).splitlines() == [
        "turn      0       1       2",
        "D0 draft  ddd.....................",
        "D0 verify ....v...................",
        "V1        7=======128x.........x..",
        "V2        ........7=======345=====",
        "a column: 1/8 turn = 125 ms; 12==: run 12; xx: cancelled; d: drafts; v: lm_head, walk; .: idle",
    ]


def test_errors_of_a_window_suggest_an_option() -> None:
    with pytest.raises(UsageError, match=r"the text ends 2\.5 turns after its first token; lower --skip"):
        window(1.0, 1.0 + 2.5 * 0.08, 0.08, 12, skip=3)
    with pytest.raises(UsageError, match="--turns may be at most 45"):
        draw([], 1, window(0.0, 1e3, 1.0, 46), 46)


DOCS = Path(__file__).parents[3] / "docs"
DOCUMENT = DOCS / "reference" / "strategies.md"
METHOD = DOCS / "explained" / "method.md"


def test_every_strategy_has_a_section() -> None:
    assert set(re.findall(r"^## (\w+)$", DOCUMENT.read_text(), re.MULTILINE)) == set(STRATEGIES)


@pytest.mark.slow
@pytest.mark.parametrize(("document", "name"), [
    (document, name) for document in (DOCUMENT, METHOD)
    for name in re.findall(r"<!-- timeline (\w+)", document.read_text(encoding="utf-8"))],
    ids=lambda value: value if isinstance(value, str) else value.stem)
def test_the_timelines_are_those_of_the_code(document: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """After an intended change of a schedule run: make timelines."""
    text = document.read_text()
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
