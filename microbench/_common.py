"""Command lines, the demonstration model's prompts, and tables of (what, value, unit)."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from flowspec_edge.bench.tasks import load_prompts
from flowspec_edge.model.modeldir import resolve_model
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.util.resources import resource_dir

Row = tuple[str, float, str]


def demo_prompts(count: int) -> list[list[int]]:
    """Token ids of at most ``count`` held-out prompts."""
    model = resolve_model()
    tokenizer = Tokenizer(model)
    prompts = load_prompts(resource_dir("models") / model.name / "prompts.jsonl", count)
    return [tokenizer.encode(prompt.text) for prompt in prompts]


def options(doc: str | None, **defaults: int | str) -> argparse.Namespace:
    """The command line's ``--NAME VALUE``, of the types of ``defaults``."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def print_rows(rows: Iterable[Row]) -> None:
    for name, value, unit in rows:
        print(f"{name:<78} {value:9.3f} {unit}".rstrip(), flush=True)
