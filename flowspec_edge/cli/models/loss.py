"""``flowspec models loss``: what a sharded model's quantised weights cost."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.cli.common.options import torch_device_name
from flowspec_edge.errors import UsageError
from flowspec_edge.util.bounded_read import read_text

if TYPE_CHECKING:
    from flowspec_edge.lab.bench.weight_loss import WeightLoss
    from flowspec_edge.model.text import Tokenizer

_TEXT_TOKENS = 256  # of one text; the caches hold one at a time


def loss(
    directory: Annotated[Path, typer.Argument(help="A sharded model, all parts of it.", metavar="DIR")],
    against: Annotated[str, typer.Option(
        "--against", help="The checkpoint that it was made from: a directory, or a model of flowspec.",
        metavar="NAME|DIR")],
    text: Annotated[Path | None, typer.Option(
        "--text", help="A text file to measure on.  Default: the demonstration's prompts.",
        metavar="FILE")] = None,
    tokens: Annotated[int, typer.Option(
        "--tokens", min=2, max=1 << 20, help="Maximum tokens of the text.", metavar="N")] = 1024,
    device: Annotated[str, typer.Option(
        "--device", callback=torch_device_name, metavar="DEVICE",
        help="cpu, cuda or cuda:N; auto: the GPU if PyTorch sees one, else the CPU.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Measure what 4- or 8-bit weights cost: perplexity, KL divergence, and how often the best token changes.

    The answers of every strategy are those of the quantised model, token for token; this is how far that
    model is from its checkpoint.  One layer of the checkpoint is in memory at a time.

    Examples:

      flowspec models loss llama-13b --against ./Llama-2-13b-chat --text book.txt
      flowspec models loss demo-int4 --against demo --json
    """
    from flowspec_edge.model.opened import OpenModel, resolve_model

    sharded, checkpoint = OpenModel(directory), resolve_model(against)
    if not sharded.sharded:
        raise UsageError(f"{directory} is not a sharded model: make one with flowspec models shard")
    if checkpoint.sharded:
        raise UsageError(f"--against {against} is sharded: give the checkpoint that both were made from")
    if text is not None and not text.is_file():
        raise UsageError(f"--text: no file {text}")
    from flowspec_edge.cli.common.workload import progress
    from flowspec_edge.lab.bench.weight_loss import steps, weight_losses
    from flowspec_edge.model.text import Tokenizer
    from flowspec_edge.util.torchdevice import architectures, gpus, pick

    picked, reason = pick(device, gpus(), architectures(), 0)
    if reason:
        print(f"flowspec: note: on the CPU: {reason}", file=sys.stderr)
    texts = _texts(Tokenizer(checkpoint), text, tokens, min(_TEXT_TOKENS, checkpoint.max_positions))
    with progress(steps(sharded, checkpoint), "layers") as advance:
        losses = weight_losses(sharded, checkpoint, texts, picked, lambda: advance("a stage"))
    if as_json:
        print(json.dumps([asdict(weight_loss) for weight_loss in losses], indent=2))
    else:
        _show(losses)


def _texts(tokenizer: Tokenizer, path: Path | None, tokens: int, longest: int) -> list[list[int]]:
    """Cut the file, or the prompts, into pieces of about equal length."""
    from flowspec_edge.cli.common.workload import demo_prompts
    from flowspec_edge.lab.bench.tasks import load_prompts

    if path is None:
        ids = [tokenizer.encode(prompt.text) for prompt in load_prompts(demo_prompts())]
    else:
        token_ids = tokenizer.encode(read_text(path))
        ids = [token_ids[lo:lo + longest] for lo in range(0, len(token_ids), longest)]
    pieces: list[list[int]] = []
    for piece in ids:
        remaining = tokens - sum(map(len, pieces))
        if len(piece := piece[:min(longest, remaining)]) >= 2:
            pieces.append(piece)
    if not pieces:
        raise UsageError(f"{path} has less than two tokens: give a longer text")
    return pieces


def _show(losses: list[WeightLoss]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = losses[0]
    title = f"{first.tokens:,} tokens; perplexity of the checkpoint {first.reference_perplexity:.3f}"
    table = Table(title=title, title_justify="left")
    table.add_column("weights")
    for heading in ("perplexity", "over the checkpoint's", "KL, nats a token", "same best token"):
        table.add_column(heading, justify="right")
    for weight_loss in losses:
        table.add_row(weight_loss.weights, f"{weight_loss.perplexity:.3f}",
                      f"{weight_loss.perplexity / weight_loss.reference_perplexity:.4f}", f"{weight_loss.kl:.5f}",
                      f"{weight_loss.same_best_token:.1%}")
    Console().print(table)
