"""``flowspec models``: what models there are, and how the demonstration model and SPD's module are made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowspec_edge.cli.listing import print_columns
from flowspec_edge.modeldir import ModelDir, resolve_model, shipped_models

app = typer.Typer(help="Models: what there is, and training.", no_args_is_help=True)


@app.command("list")
def list_models() -> None:
    """List the models that come with the package."""
    models = [resolve_model(name) for name in shipped_models()]
    if not models:
        print("no model comes with this package; make one with: flowspec models train-demo --out DIR")
        return
    print_columns([(model.name, _describe(model), str(model.path)) for model in models])


@app.command("train-demo")
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


@app.command("train-spd")
def train_spd(
    model: Annotated[str, typer.Option("--model", help="The model, by name or directory.", metavar="DIR")],
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


def _describe(model: ModelDir) -> str:
    drafts = {"eagle2": model.eagle2, "draft-lm": model.draft_lm, "spd": model.spd}
    parts = [name for name, path in drafts.items() if path]
    family = model.config.get("model_type", "unknown family")
    return (f"{family}, {model.layers} layers of width {model.hidden_width}, "
            f"{model.size / 1e6:.1f} MB, drafts: {', '.join(parts) or 'none'}")
