"""``flowspec models``: list, shard, inspect, verify, train-head, train-spd."""

from __future__ import annotations

from typing import Any

import typer

from flowspec_edge.cli.common.listing import print_columns
from flowspec_edge.cli.models import shard, train
from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import DRAFT_PARTS, ModelDir, resolve_model, shipped_models

app = typer.Typer(help="Models: list them, cut them into shards, train draft parts.", no_args_is_help=True)
_ANY: dict[Any, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}


@app.command("list")
def list_models() -> None:
    """List the models that come with the package."""
    models = [resolve_model(name) for name in shipped_models()]
    if not models:
        print("no model comes with this package; give a checkpoint's directory as --model")
        return
    print_columns([(model.name, _describe(model), str(model.path)) for model in models])


@app.command("train-demo", hidden=True, context_settings=_ANY)
def train_demo() -> None:
    """Name the script that replaces this command."""
    raise UsageError("the demonstration model is trained in the source tree: "
                     "python models/recipe/train_demo.py --out DIR")


app.command("train-head")(train.train_head)
app.command("train-spd")(train.train_spd)
app.command("shard")(shard.shard)
app.command("inspect")(shard.inspect)
app.command("verify")(shard.verify)


def _describe(model: ModelDir) -> str:
    parts = [part for kind, part in DRAFT_PARTS.items() if model.draft(kind)]
    family = model.config.get("model_type", "unknown family")
    return (f"{family}, {model.layers} layers of width {model.hidden_width}, "
            f"{model.size / 1e6:.1f} MB, drafts: {', '.join(parts) or 'none'}")
