"""``flowspec models``: list, fetch, head, train-head, train-spd, shard, loss, inspect, verify."""

from __future__ import annotations

import typer

from flowspec_edge.cli.models import fetch, head, loss, shard, train

app = typer.Typer(help="Models: list and fetch them, cut them into shards, train draft parts.",
                  no_args_is_help=True)
app.command("list")(fetch.list_models)
app.command("fetch")(fetch.fetch)
app.command("head")(head.head)
app.command("train-head")(train.train_head)
app.command("train-spd")(train.train_spd)
app.command("shard")(shard.shard)
app.command("loss")(loss.loss)
app.command("inspect")(shard.inspect)
app.command("verify")(shard.verify)
