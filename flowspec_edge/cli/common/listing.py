"""``flowspec strategies`` and ``flowspec profiles``, and the columns in which lists are printed."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from flowspec_edge.util.terminal import printable

if TYPE_CHECKING:
    from flowspec_edge.strategies.base import Strategy


_EMPTY = "-"  # a default without any text


def strategies(
    name: Annotated[str | None, typer.Argument(
        help="One of them, or package.module:Class: list its parameters.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List the strategies, or the parameters of one.

    flowspec is the method of the FlowSpec paper.  flowspec_plus (FlowSpec+) is this project's extension of it,
    and the default.  It keeps one tree for a whole round, and drafts and sends the likeliest nodes of this tree
    at any depth.

    Strategies of installed packages are listed, too; their entry points are in the group
    "flowspec.strategies".  Name a class of your own as package.module:Class, here and for --strategy.  Its
    module must be installed, or be in the current directory.

    Examples:

      flowspec strategies
      flowspec strategies pipedec
      flowspec strategies my_package.module:MyStrategy
    """
    from flowspec_edge.strategies.registry import strategy_class, strategy_names

    if name is not None:
        _describe(name, strategy_class(name), as_json)
        return
    rows: list[tuple[str, ...]] = [(other, strategy_class(other).summary) for other in strategy_names()]
    if as_json:
        print(json.dumps([{"name": other, "summary": summary} for other, summary in rows], indent=2))
    else:
        print_columns(rows)


def _describe(name: str, strategy: type[Strategy], as_json: bool) -> None:
    from flowspec_edge.strategies.registry import parameters_of

    parameters = list(parameters_of(strategy).values())
    if as_json:
        rows = [{"name": p.name, "default": p.default, "range": p.range, "meaning": p.meaning} for p in parameters]
        print(json.dumps({"name": strategy.name, "summary": strategy.summary, "parameters": rows}, indent=2))
        return
    print(f"{strategy.name}: {printable(strategy.summary)}\n")
    print_columns([("parameter", "default", "range", "meaning"),
                   *((p.name, _as_text(p.default), p.range, p.meaning) for p in parameters)])
    example = next((f" --set {shlex.quote(f'{p.name}={text}')}" for p in parameters
                    if (text := _as_text(p.default)) != _EMPTY), "")
    print(f"\nExample: flowspec generate \"import os\" --strategy {shlex.quote(name)}{example}")


def _as_text(default: object) -> str:
    if default is None:
        return "own"
    return str(default).lower() if isinstance(default, bool) else str(default) or _EMPTY


def profiles() -> None:
    """List the profiles of devices and testbeds."""
    from flowspec_edge.device_profile import load_profile, profile_names

    profiles = [load_profile(name) for name in profile_names()]
    print_columns([(p.name, p.kind, p.provenance, p.summary) for p in profiles])


def print_columns(rows: list[tuple[str, ...]]) -> None:
    """Print columns, left-aligned and two spaces apart."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
