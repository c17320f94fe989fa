"""``flowspec models``: list, fetch, head, train-head, train-spd, shard, loss, inspect, verify."""

from __future__ import annotations

from typing import Any

import typer

from flowspec_edge.cli.models import fetch, head, loss, shard, train
from flowspec_edge.errors import UsageError

app = typer.Typer(help="Models: list and fetch them, cut them into shards, train draft parts.",
                  no_args_is_help=True)
_ANY: dict[Any, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}


@app.command("train-demo", hidden=True, context_settings=_ANY)
def train_demo() -> None:
    """Name the script that replaces this command."""
    raise UsageError("the demonstration model is trained in the source tree: "
                     "python models/recipe/train_demo.py --out DIR")


app.command("list")(fetch.list_models)
app.command("fetch")(fetch.fetch)
app.command("head")(head.head)
app.command("train-head")(train.train_head)
app.command("train-spd")(train.train_spd)
app.command("shard")(shard.shard)
app.command("loss")(loss.loss)
app.command("inspect")(shard.inspect)
app.command("verify")(shard.verify)
