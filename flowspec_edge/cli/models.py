"""``flowspec models``: what models there are, and the commands that make them and their parts."""

from __future__ import annotations

import typer

from flowspec_edge.cli import models_shard, models_train
from flowspec_edge.cli.listing import print_columns
from flowspec_edge.modeldir import DRAFT_PARTS, ModelDir, resolve_model, shipped_models

app = typer.Typer(help="Models: what there is, cutting them into parts, and training.", no_args_is_help=True)


@app.command("list")
def list_models() -> None:
    """List the models that come with the package."""
    models = [resolve_model(name) for name in shipped_models()]
    if not models:
        print("no model comes with this package; make one with: flowspec models train-demo --out DIR")
        return
    print_columns([(model.name, _describe(model), str(model.path)) for model in models])


app.command("train-demo")(models_train.train_demo)
app.command("train-head")(models_train.train_head)
app.command("train-spd")(models_train.train_spd)
app.command("shard")(models_shard.shard)
app.command("inspect")(models_shard.inspect)
app.command("verify")(models_shard.verify)


def _describe(model: ModelDir) -> str:
    parts = [part for kind, part in DRAFT_PARTS.items() if model.draft(kind)]
    family = model.config.get("model_type", "unknown family")
    return (f"{family}, {model.layers} layers of width {model.hidden_width}, "
            f"{model.size / 1e6:.1f} MB, drafts: {', '.join(parts) or 'none'}")
