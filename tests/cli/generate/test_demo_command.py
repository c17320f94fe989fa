"""``flowspec demo``: one question over emulated boards, plainly and with FlowSpec."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
from kits.plain_answers import tokenizer_of
from kits.tiny_model_dir import tiny_model_dir
from kits.transformers_generate import reference_text
from rich.console import Console

from flowspec_edge.cli.common import workload
from flowspec_edge.cli.common.workload import demo_prompts
from flowspec_edge.cli.generate import demo
from flowspec_edge.cli.generate.side_by_side import SideBySide
from flowspec_edge.cli.main import main
from flowspec_edge.d0 import core
from flowspec_edge.d0.request import Result, Stats
from flowspec_edge.lab.bench.tasks import load_prompts
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.rule import Sampling

FEW = ("--stages", "2", "--max-new-tokens", "8")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(autouse=True, params=[64, 2], ids=["emulated", "played back"])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a machine that has enough for the processes, and of one that has not."""
    monkeypatch.setattr(demo, "cores", lambda: request.param)
    return int(request.param)


def transformers_answer(model: Path, text: str) -> str:
    tokenizer = tokenizer_of(model)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(reference_text(model, ids, Sampling(), 8, [])[0]))


def test_the_same_words_twice_then_a_table(model: Path, capsys: pytest.CaptureFixture[str], processors: int) -> None:
    assert main(["demo", "--model", str(model), *FEW, "--seconds", "1000"]) == 0
    out = capsys.readouterr().out
    asked = next(prompt.text for prompt in load_prompts(demo_prompts()) if prompt.id == "13")
    assert asked in out
    answer = transformers_answer(model, asked)
    assert f"plain pipelining\n{answer}\n" in out
    assert f"FlowSpec\n{answer}\n" in out
    said = " ".join(out.split())
    assert "on the paper's 3 boards" in said
    assert re.search(r"The same 8 tokens: [\d.]+ tokens/s with FlowSpec, [\d.]+ without", said)
    clock = "EMULATED paper-7b, wall clock" if processors > 2 else "VIRTUAL TIME under paper-7b"
    table = out.split(f"{clock}, 2 stages, T = 0, one answer")[1]
    for strategy in ("autoregressive", "flowspec_plus", "chunk_pp", "flowspec"):
        assert re.search(rf"^{strategy} .* 0/1 +0/8 *$", table, re.MULTILINE)
    assert ("0 of 4 answers and 0 of 32 tokens differ from plain decoding's (weights and arithmetic in fp32)."
            in said)


@pytest.mark.parametrize("processors", [64], indirect=True)  # the emulated time of two answers is over a second
def test_little_time_leaves_methods_out_and_says_which(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(model), *FEW, "--seconds", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Left out, since 1 s were over (--seconds): chunk_pp, flowspec." in out
    assert "0 of 2 answers and 0 of 16 tokens differ from plain decoding's" in out


def test_a_model_with_a_chat_template_is_asked_through_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model_dir(tmp_path, layers=2, hidden=32)
    (model / "target" / "chat_template.jinja").write_text(TEMPLATE)
    assert main(["demo", "What?", "--model", str(model), *FEW, "--seconds", "1"]) == 0
    out = capsys.readouterr().out
    assert "\nWhat?\n" in out
    assert f"FlowSpec\n{transformers_answer(model, '<user>What?<assistant>')}\n" in out


@pytest.mark.parametrize("processors", [64], indirect=True)
def test_a_late_emulation_is_said_with_the_speeds(model: Path, capsys: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_LATE_SHARE", -1.0)  # any answer counts as late
    assert main(["demo", "--model", str(model), *FEW, "--seconds", "1"]) == 0
    out, err = capsys.readouterr()
    assert "too slow or too busy to keep the boards' time, so these speeds are too low" in " ".join(out.split())
    assert "emulation:" not in err


@pytest.mark.parametrize("processors", [2], indirect=True)
def test_a_terminal_plays_both_at_the_boards_pace(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping is left to the clock of this test, which jumps."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    screen = io.StringIO()
    columns = SideBySide(Console(file=screen, width=100), ["plain", "fast"])  # a paragraph each
    slow, fast = (Result([65, 66, 67], "length", Stats(), token_at=at) for at in ((1.0, 2.0, 3.0), (1.0, 1.5, 1.5)))
    demo._play([slow, fast], columns, Tokenizer(OpenModel(model)).decode, at_pace=True)
    assert now[0] == 3.0
    assert "3 tokens in 2.0 s: 1.0 tokens/s" in screen.getvalue()
    assert "3 tokens in 0.5 s: 4.0 tokens/s" in screen.getvalue()


@pytest.mark.parametrize(("width", "together"), [(100, True), (60, False)])
def test_a_terminal_shows_columns_if_it_is_wide_enough(width: int, together: bool) -> None:
    screen = io.StringIO()
    columns = SideBySide(Console(file=screen, force_terminal=True, width=width), ["plain", "fast"])
    with columns.shown():
        for number, text in enumerate(("slow words", "quick words")):
            with columns.answer(number) as (write, count):
                count([1])
                write(text)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).splitlines()
    assert any("slow words" in line and "quick words" in line for line in last) == together
    assert any("quick words" in line for line in last)


def test_a_recorded_answer_needs_no_computation(model: Path, tmp_path: Path, processors: int,
                                                monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """Played back over what the model said; another question, or more tokens than were recorded, are computed."""
    recording, asked = tmp_path / "recording.flowrec", tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "def f("}\n')
    assert main(["record", "--model", str(model), "--prompts", str(asked), "--temperatures", "0",
                 "--max-new-tokens", "8", "--nodes", "12", "--out", str(recording)]) == 0
    monkeypatch.setattr(workload, "shipped_recording", lambda name: recording)
    for words, taken in (("def f(", processors == 2), ("def g(", False)):
        capsys.readouterr()
        assert main(["demo", words, "--model", str(model), *FEW]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("the head's drafts are recorded ones" in said) == taken
        assert "0 of 32 tokens differ" in said or "0 of 16 tokens differ" in said
