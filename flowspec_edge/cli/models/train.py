"""``flowspec models train-head`` and ``train-spd``: draft parts for an existing model."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowspec_edge.cli.common.options import MOST_REPEATS, MOST_TOKENS
from flowspec_edge.model.draft_kinds import trained_kinds
from flowspec_edge.model.opened import resolve_model

if TYPE_CHECKING:
    _Trained = str
else:
    _Trained = Literal[tuple(kind.name for kind in trained_kinds())]
_Model = Annotated[str, typer.Option("--model", help="The model, by name or directory.", metavar="DIR")]


def train_spd(
    model: _Model,
    out: Annotated[Path | None, typer.Option(
        "--out", help="The finished module's directory.  Default: MODEL/spd.", metavar="DIR")] = None,
    work: Annotated[Path | None, typer.Option(
        "--work", help="Directory of checkpoints; with the same one a training resumes.  Default: "
        "OUT-work, beside the result.", metavar="DIR")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps, to try it.")] = False,
) -> None:
    """Train SPD's speculation module for a model; the model's weights do not change.

    The training text is the Python source of the interpreter and of installed packages.  An interrupted
    training resumes.

    Examples:

      flowspec models train-spd --model my-demo
    """
    open_model = resolve_model(model)  # a wrong name is found before torch is imported
    from flowspec_edge.lab.spd.training import train_spd as train

    train(open_model, out=out, work=work, quick=quick)


def train_head(
    model: _Model,
    kind: Annotated[_Trained, typer.Option(
        "--kind", help="Which head.")],
    data: Annotated[list[Path] | None, typer.Option(
        "--data", metavar="FILES", help="Training text: a file or a directory; may be given several times.  "
        "Default: the Python source of the interpreter and of installed packages.")] = None,
    out: Annotated[Path | None, typer.Option(
        "--out", help="The finished head's directory.  Default: MODEL/KIND; must be given for a plain "
        "checkpoint.", metavar="DIR")] = None,
    work: Annotated[Path | None, typer.Option(
        "--work", help="Directory of checkpoints, tokens and the target's states; with the same one a "
        "training resumes.  Default: OUT-work, beside the result.", metavar="DIR")] = None,
    steps: Annotated[int | None, typer.Option(
        "--steps", min=1, max=MOST_REPEATS, help="Steps of 4096 tokens.  Default: 900.", metavar="N")] = None,
    draft_vocab: Annotated[int | None, typer.Option(
        "--draft-vocab", min=1, max=MOST_TOKENS,
        help="Tokens that an EAGLE-3 head drafts, the most frequent ones.  Default: "
        "32000, or the target's whole vocabulary if that is smaller.", metavar="N")] = None,
    depth: Annotated[int | None, typer.Option(
        "--depth", min=1, max=64,
        help="Steps for which an EAGLE head is unrolled on its own outputs (default: 6); slots of the block "
        "of a dflash or dspark head (default: 16).",
        metavar="N")] = None,
    start: Annotated[Path | None, typer.Option(
        "--start", help="Continue from this EAGLE-2 head: unrolled from the first step, and the learning "
        "rate falls after a fifth of the run.  Default: an untrained head.", metavar="DIR")] = None,
    quick: Annotated[bool, typer.Option(
        "--quick", help="60 steps of 256 tokens, to try it; --steps may give fewer.")] = False,
) -> None:
    """Train an EAGLE head or a block drafter for a model; the model's weights do not change.

    Text files (.txt, .py, .md) are read as they are.  A line of a .jsonl file has "text", or "prompt" with
    "completion" (appended as it is) or "answer", or "messages"; answers and messages go through the
    tokenizer's chat template, if it has one.  The best text is what the target writes in its later use.
    A fiftieth of the text is held out; the share of its tokens that the head predicts is printed and written
    to card.toml beside the head.

    Takes hours on a CPU, less on a GPU; an interrupted training resumes.

    Examples:

      flowspec models train-head --model my-demo --kind eagle3
      flowspec models train-head --model my-demo --kind eagle2 --data notes --data more.txt
      flowspec models train-head --model ./Llama-3 --kind eagle3 --data chats.jsonl --out head
      flowspec models train-head --model my-demo --kind eagle2 --start my-demo/eagle2 --depth 8 --out deep
    """
    from flowspec_edge.lab.training.data_files import data_files

    open_model = resolve_model(model)  # a wrong name is found before torch is imported
    data_files(data or ())  # and so is a missing file
    from flowspec_edge.lab.training.train_head import HeadOptions, train_head_part

    options = HeadOptions(tuple(data or ()), steps, draft_vocab, quick, depth, start)
    train_head_part(open_model, kind, options, date.today().isoformat(), out=out, work=work)
