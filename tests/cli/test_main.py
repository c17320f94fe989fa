"""The command as a process: help, lists, closed pipes; generate/test_generate.py has its signals."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
import typer
from kits.command_options import all_commands
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.cli.main import Commands, main
from flowspec_edge.device_profile import profile_names
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES

COMMAND = (sys.executable, "-m", "flowspec_edge.cli.main")


COMMANDS = [path for path, _ in all_commands() if not Commands.lazy[path[0]].hidden]
GROUPS = [(), *dict.fromkeys(path[:end] for path in COMMANDS for end in range(1, len(path)))]
LISTS = {("profiles",), ("models", "list")}  # which take nothing


def printed(*arguments: str) -> str:
    with redirect_stdout(StringIO()) as said:
        assert main(arguments) == 0
    return said.getvalue()


@cache
def help_of(command: tuple[str, ...]) -> str:
    return printed(*command, "--help")


@pytest.mark.parametrize("command", [path for path in COMMANDS if path not in LISTS])
def test_help_has_examples(command: tuple[str, ...]) -> None:
    out = help_of(command)
    assert "Example" in out
    assert f"flowspec {' '.join(command)}" in out.split("Example")[1]


def test_a_list_of_commands_says_what_each_one_says_of_itself() -> None:
    """The lines are written twice: the list of commands does not import them."""
    for name, lazy in Commands.lazy.items():
        loaded = lazy.load()
        help_text = loaded.info.help if isinstance(loaded, typer.Typer) else inspect.getdoc(loaded)
        if not lazy.hidden:
            assert " ".join(str(help_text).split("\n\n")[0].split()) == lazy.summary, name


@pytest.mark.parametrize("command", [("generate",), ("chat",), ("serve",), ("bench", "run"),
                                     ("bench", "tables"), ("bench", "timeline"), ("sweep",)])
def test_help_is_short_and_help_all_complete(command: tuple[str, ...]) -> None:
    short, full = (set(re.findall(r"^│ (--[a-z-]+)", help_text, re.MULTILINE)) for help_text in (
        help_of(command), printed(*command, "--help-all")))
    assert {"--set", "--help-all"} < short < full
    assert len(short) <= 20
    assert not {"--tau", "--pipedec-width"} & full


def test_every_parameter_is_listed_by_a_strategy_that_reads_it() -> None:
    listed = {row["name"]: row["default"] for name in STRATEGIES
              for row in json.loads(printed("strategies", name, "--json"))["parameters"]}
    assert listed == Params().flat()


def test_lists_have_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(STRATEGIES)
    assert all(cls.summary in line for cls, line in zip(STRATEGIES.values(), lines, strict=True))
    assert main(["profiles"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == profile_names()
    assert main(["models", "list"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", GROUPS)
def test_a_group_without_a_command_prints_its_help(command: tuple[str, ...],
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(command)) == 2
    out, err = capsys.readouterr()
    assert "Usage:" in out + err
    assert "error" not in err


@pytest.mark.slow
@pytest.mark.nightly
def test_a_reader_that_goes_away_ends_it_quietly(tmp_path: Path) -> None:
    model = tiny_model_dir(tmp_path, layers=2, hidden=32)
    endless = (*COMMAND, "generate", "x = ", "--model", str(model), "--clock", "virtual", "--stages", "1",
               "--strategy", "autoregressive", "--max-new-tokens", "2000", "--temperature", "1")
    with subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_list_into_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run([*COMMAND, "profiles"], stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"")
