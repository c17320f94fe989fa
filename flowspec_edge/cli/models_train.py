"""``flowspec models train-…``: how the demonstration model and its draft parts are made."""

from __future__ import annotations

from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.modeldir import resolve_model

_Model = Annotated[str, typer.Option("--model", help="The model, by name or directory.", metavar="DIR")]


class HeadKind(str, Enum):
    """The heads that can be trained, as the command line names them."""

    EAGLE2 = "eagle2"
    EAGLE3 = "eagle3"


def train_demo(
    out: Annotated[Path, typer.Option("--out", help="Where the finished model goes.", metavar="DIR")],
    work: Annotated[Path | None, typer.Option(
        "--work", help="Where checkpoints go; the same directory resumes.  Default: OUT.work.",
        metavar="DIR")] = None,
    quick: Annotated[bool, typer.Option(
        "--quick", help="A few steps of tiny models, to try the recipe.")] = False,
) -> None:
    """Train the demonstration model: tokenizer, target, EAGLE-2 head and draft model.

    Uses the Python source of the interpreter and of installed packages.  Takes hours on a CPU, less
    on a GPU; started again, it goes on where it was.

    Example:

      flowspec models train-demo --out my-demo
    """
    from flowspec_edge.training.demo import train_demo as train

    train(out, work=work, quick=quick)


def train_spd(
    model: _Model,
    out: Annotated[Path | None, typer.Option(
        "--out", help="Where the finished module goes.  Default: MODEL/spd.", metavar="DIR")] = None,
    work: Annotated[Path | None, typer.Option(
        "--work", help="Where checkpoints go; the same directory resumes.  Default: MODEL.spd-work.",
        metavar="DIR")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps, to try it.")] = False,
) -> None:
    """Train SPD's speculation module for a model, whose weights stay as they are.

    Uses the Python source of the interpreter and of installed packages, in the model's own tokens.
    Started again, it goes on where it was.

    Example:

      flowspec models train-spd --model my-demo
    """
    found = resolve_model(model)  # a wrong name is found before torch is imported
    from flowspec_edge.training.spd_part import train_spd as train

    train(found, out=out, work=work, quick=quick)


def train_head(
    model: _Model,
    kind: Annotated[HeadKind, typer.Option("--kind", help="Which head.")],
    data: Annotated[list[Path] | None, typer.Option(
        "--data", metavar="FILES", help="Training text: a file, or a directory to search; may be given "
        "again.  Default: the Python source of the interpreter and of installed packages.")] = None,
    out: Annotated[Path | None, typer.Option(
        "--out", help="Where the finished head goes.  Default: MODEL/KIND.  A plain checkpoint has no place "
        "for it, and --out must be given.", metavar="DIR")] = None,
    work: Annotated[Path | None, typer.Option(
        "--work", help="Where checkpoints go; the same directory resumes.  Default: MODEL.KIND-work.",
        metavar="DIR")] = None,
    steps: Annotated[int | None, typer.Option(
        "--steps", min=1, help="Steps of 4096 tokens.  Default: 900.", metavar="N")] = None,
    draft_vocab: Annotated[int | None, typer.Option(
        "--draft-vocab", min=1, help="Tokens that an EAGLE-3 head drafts, the most frequent ones.  Default: "
        "32000, or the target's whole vocabulary if that is smaller.", metavar="N")] = None,
    depth: Annotated[int | None, typer.Option(
        "--depth", min=1, help="Steps that the head is unrolled, each on its own outputs.  Default: 6.",
        metavar="N")] = None,
    start: Annotated[Path | None, typer.Option(
        "--start", help="Go on from this EAGLE-2 head: unrolled from the first step on, and the learning "
        "rate falls from a fifth of the run on.  Default: a head that knows nothing.", metavar="DIR")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps of few tokens, to try it.")] = False,
) -> None:
    """Train an EAGLE-2 or EAGLE-3 head for a model, whose weights stay as they are.

    Text files (.txt, .py, .md) are read as they stand.  A line of a .jsonl file has "text", or
    "prompt" with "completion" (which goes on where the prompt ends) or "answer", or "messages";
    an answer and messages go through the tokenizer's chat template where it has one.  The best
    text is what the target itself writes in its later use.  A fiftieth of the text is held out;
    how often the head foresees the target on it is printed in the end and written to card.toml
    beside the head.

    Takes hours on a CPU, less on a GPU; started again, it goes on where it was.

    Examples:

      flowspec models train-head --model my-demo --kind eagle3

      flowspec models train-head --model my-demo --kind eagle2 --data notes --data more.txt

      flowspec models train-head --model ./Llama-3 --kind eagle3 --data chats.jsonl --out head

      flowspec models train-head --model my-demo --kind eagle2 --start my-demo/eagle2 --depth 8 --out deep
    """
    found = resolve_model(model)  # a wrong name is found before torch is imported
    from flowspec_edge.training.head_part import HeadOptions, train_head_part

    options = HeadOptions(tuple(data or ()), steps, draft_vocab, quick, depth, start)
    train_head_part(found, kind.value, options, date.today().isoformat(), out=out, work=work)
