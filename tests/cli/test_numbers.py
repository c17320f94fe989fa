"""Absurd numbers for every option of every command: one line that names the option, exit code 2, no work."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import typer
from kits.command_options import all_commands, options, refusal

from flowspec_edge.cli.common.options import not_nan
from flowspec_edge.cli.main import app, main
from flowspec_edge.errors import UsageError
from flowspec_edge.strategies.params import Params, all_parameters, set_parameters

# Each option once: commands share their definitions.
NUMBERS = {(name, info.min, info.max, str(info.callback)): (path, name) for path, function in all_commands()
           for name, types, info in options(function) if types & {int, float}}
# Numbers that are lists in a text.
LISTS = [*((("sweep",), axis) for axis in ("bandwidth", "depth", "stages", "segment", "latency", "acceptance", "tau")),
         (("bench", "run"), "--temperatures"), (("models", "shard"), "--split"),
         (("device", "kernels"), "--rows"), (("device", "kernels"), "--shape")]
# Parameters of strategies: --set NAME=VALUE.
SETTINGS = [name for name, one in all_parameters().items() if one.kind in (int, float)]
# What the commands must be given; none of it exists.
GIVEN = {("generate",): ["x = "], ("models", "shard"): ["--model", "demo", "--out", "OUT"],
         ("models", "inspect"): ["NONE"], ("models", "train-head"): ["--model", "NONE"],
         ("serve",): ["--model", "NONE"], ("deploy", "init"): ["none.invalid"],
         ("plan",): ["--devices", "NONE"], ("record",): ["--out", "OUT"], ("sweep",): ["bandwidth"]}
LARGE = {"--seed": 2**64}  # else 10^18


@pytest.fixture(scope="module")
def built() -> Any:
    """The commands, made once: typer takes a while."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("value", ["nan", "-1", "", "1e309", str(10**18), "1" * 5000])
@pytest.mark.parametrize("name", SETTINGS)
def test_an_absurd_parameter_is_refused(value: str, name: str) -> None:
    with pytest.raises(UsageError, match=name.replace("_", "[-_]")) as caught:
        set_parameters(Params(), [f"{name}={value}"], all_parameters(), "any strategy")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("values", [("nan", "-1"), pytest.param(
    ("inf", "1e309", "10^18", "", "1" * 5000), marks=pytest.mark.soak)], ids=["usual", "rare"])
@pytest.mark.parametrize(("path", "name"), [*NUMBERS.values(), *LISTS])
def test_an_absurd_number_is_refused(
        values: tuple[str, ...], path: tuple[str, ...], name: str, built: Any, tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flowspec_edge.cli.main.app", built)
    for number in values:
        value = str(LARGE.get(name, 10**18)) if number == "10^18" else number
        given = GIVEN.get(path, []) if name.startswith("-") else []
        code = main([*path, *given, f"{name}={value}"])
        out, err = capfd.readouterr()
        assert code == 2, (value, out, err)
        assert out == ""
        assert err.startswith("flowspec: error: ")
        assert err.count("\n") == 1
        assert name.rstrip("s").split("-")[-1] in err, (value, err)  # --temperatures: "temperature must be"
    assert not list(tmp_path.iterdir())


def test_nan_is_refused_by_the_options_themselves() -> None:
    """typer 0.19 lets it pass any smallest and largest value."""
    assert (not_nan(None), not_nan(0.5)) == (None, 0.5)
    with pytest.raises(typer.BadParameter, match="nan is not a number"):
        not_nan(math.nan)


def test_stages_are_refused_before_any_is_made() -> None:
    """Without a limit the command neither answers nor ends."""
    asked = ["generate", "x = ", "--clock", "virtual", "--stages"]
    assert refusal([*asked, str(10**9)]) == "1000000000 is not at most 256"
    assert refusal([*asked, "256"]) == ""
