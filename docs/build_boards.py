"""Renews the table of boards, models and predicted speed in docs/reference/plan.md; takes about a minute.

    python docs/build_boards.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from flowspec_edge.boards.planning import planner
from flowspec_edge.boards.planning.board_spec import parse_devices
from flowspec_edge.boards.planning.layer_split import problem_for
from flowspec_edge.boards.planning.model_size import PlanDtype, model_bytes
from flowspec_edge.cli.boards.plan import usual_tokens
from flowspec_edge.lab.predictions import predict

DOCUMENT = Path(__file__).parent / "reference" / "plan.md"
TABLE = re.compile(r"(?<=<!-- boards, made by build_boards.py -->\n).*?(?=<!-- end of boards -->)", re.DOTALL)
CONTEXT = 2048
COUNTS = (4, 5)
PROFILES = ("orin-nano-8gb", "orin-nano-8gb-super", "orin-nx-16gb")  # one AGX Orin 64 GB holds each of the models
MODELS: tuple[tuple[str, PlanDtype], ...] = (
    ("llama-2-7b", "fp16"), ("qwen3-14b", "int4"), ("qwen3-32b", "int4"), ("llama-3.3-70b", "int4"))
HEAD = ("| boards | model | 4: stage ms | tokens/s | 5: stage ms | tokens/s |", "|---|---|---|---|---|---|")


def rows(predicted: bool) -> Iterator[str]:
    """Yield the table's rows, of models that fit; without predictions "…" stands for tokens/s."""
    for name in PROFILES:
        for model, dtype in MODELS:
            cells = [cell for count in COUNTS for cell in cells_of(name, count, model, dtype, predicted)]
            if not all(cell.startswith("no") for cell in cells[::2]):
                yield f"| `{name}` | {model}, {dtype} | {' | '.join(cells)} |"


size_of = cache(model_bytes)


def cells_of(name: str, count: int, model: str, dtype: PlanDtype, predicted: bool) -> tuple[str, str]:
    """Return the slowest stage, and tokens/s with a head, by n-grams, and plain; or why it does not fit."""
    size = size_of(model, dtype)
    boards = [board.for_model(size)[0] for board in parse_devices([f"{name}:{count}"])]
    problem = problem_for(size, CONTEXT, 1, count)
    try:
        plan = planner.plan(boards, problem)
    except planner.DoesNotFit:
        held = planner.most_layers(boards, problem)
        return f"no: room for {held} of {size.layers} layers" if held >= 0 else "no: no board can draft", "–"
    return f"{plan.slowest * 1e3:.0f}", " / ".join(speeds(plan)) if predicted else "…"


def speeds(plan: planner.PipelinePlan) -> Sequence[str]:
    def tokens_per_second(strategy: str, by_ngrams: bool = False) -> str:
        tokens = usual_tokens(by_ngrams)
        [found] = predict(plan, [strategy], tokens.source, tokens.requests)
        return f"{found.tokens_per_second:.1f}"

    return (tokens_per_second("flowspec_plus"), tokens_per_second("flowspec_plus", by_ngrams=True),
            tokens_per_second("autoregressive"))


def table(predicted: bool = True) -> str:
    lines = [*HEAD]
    for row in rows(predicted):
        lines.append(row)
        print(row, file=sys.stderr, flush=True)
    return "".join(f"{line}\n" for line in lines)


def without_predictions(text: str) -> str:
    """Return the table in the document's ``text`` with "…" for tokens/s."""
    return re.sub(r"\| [\d.]+ / [\d.]+ / [\d.]+ (?=\|)", "| … ", TABLE.findall(text)[0])


if __name__ == "__main__":
    made = table()
    DOCUMENT.write_text(TABLE.sub(lambda _: made, DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
