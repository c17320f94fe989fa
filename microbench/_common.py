"""Command lines, prompts, a server, random weights, and tables of (what, value, unit)."""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.bench.tasks import load_prompts
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.stage.quant.base import Scheme
from flowspec_edge.util.resources import resource_dir

Row = tuple[str, float, str]


def demo_prompts(count: int) -> list[list[int]]:
    """Return the token ids of at most ``count`` held-out prompts."""
    model = resolve_model()
    tokenizer = Tokenizer(model)
    prompts = load_prompts(resource_dir("models") / model.name / "prompts.jsonl", count)
    return [tokenizer.encode(prompt.text) for prompt in prompts]


def options(doc: str | None, **defaults: int | str) -> argparse.Namespace:
    """Parse the command line's ``--NAME VALUE``, of the types of ``defaults``."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


@contextmanager
def serving(*options: str | int) -> Iterator[tuple[str, int]]:
    """Start ``flowspec serve`` with these options, and yield its URL and process id."""
    command = [sys.executable, "-m", "flowspec_edge.cli.main", "serve", "--port", "0", *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://[^\s,]+/v1", process.stdout.readline())
            if not match:
                raise FlowspecError("the server did not start; try: flowspec serve")
            yield match[0], process.pid
        finally:
            process.send_signal(signal.SIGTERM)


def random_codes(how: Scheme, rows: int, columns: int) -> dict[str, Tensor]:
    """Return a matrix as ``how`` stores it, of random codes."""
    return {name: torch.randint(256, size, dtype=dtype) if dtype == torch.uint8
            else torch.full(size, 0.002, dtype=dtype)
            for name, (size, dtype) in how.stored(rows, columns).items()}


def print_rows(rows: Iterable[Row]) -> None:
    for name, value, unit in rows:
        print(f"{name:<78} {value:9.3f} {unit}".rstrip(), flush=True)
