"""``flowspec generate`` against transformers' own generate, in virtual time and over processes."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kits.network_beds import heed_ctrl_c
from kits.plain_answers import plain_text, tokenizer_of
from kits.process_clusters import PATIENCE
from kits.tiny_model_dir import never_ends, tiny_model_dir
from kits.transformers_generate import reference_text

from flowspec_edge.cli.main import main
from flowspec_edge.sampling.rule import Sampling

PROMPT = "def f(x):\n    return"


def generate(model: Path, *arguments: str, clock: str = "virtual") -> int:
    return main(["generate", "--model", str(model), "--clock", clock, "--stages", "2",
                 "--max-new-tokens", "12", *arguments])


@pytest.fixture(scope="module")
def reference(model: Path) -> tuple[list[int], str]:
    """Greedy tokens and their text, from transformers alone."""
    tokenizer = tokenizer_of(model)
    new, _ = reference_text(model, tokenizer(PROMPT)["input_ids"], Sampling(), 12, [])
    return new, tokenizer.decode(new)


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_json_is_greedy_decoding_with_figures(model: Path, reference: tuple[list[int], str], clock: str,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, PROMPT, "--json", clock=clock) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["tokens"], result["text"]) == reference
    assert result["finish_reason"] == "length"
    assert {"turns", "rounds", "alt", "alr", "tokens_per_second", "ttft_s", "drafted", "verified", "accepted",
            "bytes"} <= result["stats"].keys()
    assert result["stats"]["drafted"] > 0


def test_a_checkpoint_without_a_head_looks_up_in_the_text(
        model: Path, reference: tuple[list[int], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model / "target", PROMPT, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens"] == reference[0]
    assert f"flowspec models head {model / 'target'}" in err


def test_the_family_is_checked_before_the_head(model: Path, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(model / "target", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))
    assert generate(other, PROMPT) == 2
    error = capsys.readouterr().err
    assert "'gemma'" in error
    assert "--draft" not in error


def test_text_goes_to_stdout_and_figures_to_stderr(
        model: Path, reference: tuple[list[int], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, PROMPT, "--strategy", "chunk_pp") == 0
    out, err = capsys.readouterr()
    assert out == reference[1] + "\n"
    assert "chunk_pp, 2 stages, VIRTUAL TIME under paper-7b" in err


@pytest.mark.slow
def test_ctrl_c_stops_the_text_and_prints_its_figures(tmp_path: Path) -> None:
    """Over processes; test_tracing interrupts virtual time.  The text so far is plain decoding's."""
    model = never_ends(tiny_model_dir(tmp_path / "model", layers=2, hidden=32))
    arguments = [sys.executable, "-m", "flowspec_edge", "generate", PROMPT, "--model", str(model), "--clock",
                 "wall", "--stages", "2", "--max-new-tokens", "2000"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                          preexec_fn=heed_ctrl_c) as process:
        try:
            assert process.stdout is not None
            begun = process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            rest, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 130, err
    (line,) = err.decode().splitlines()
    counted = re.search(r"(\d+) tokens? \(cancelled\)", line)
    assert counted is not None, line
    assert (begun + rest).decode() == plain_text(model, PROMPT, int(counted[1])) + "\n"
    assert int(counted[1]) < 2000


@pytest.mark.slow
def test_wall_clock_runs_show_plain_decodings_speed_too(
        model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert generate(model, PROMPT, "--max-new-tokens", "80", clock="wall") == 0
    out, err = capsys.readouterr()
    assert out == virtual_text(model, capsys, "--max-new-tokens", "80")
    found = re.search(r" ([\d.]+) tokens/s \(plain decoding: ([\d.]+)\)", err)
    assert found, err
    assert ("--strategy autoregressive" in err) == (float(found[2]) > float(found[1]))
    assert generate(model, PROMPT, "--strategy", "autoregressive", clock="wall") == 0
    assert "plain decoding" not in capsys.readouterr().err


def virtual_text(model: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What virtual time prints, where no processors are shared."""
    assert generate(model, PROMPT, *arguments) == 0
    out, err = capsys.readouterr()
    assert "plain decoding" not in err
    return out


def test_the_prompt_may_be_a_file_or_standard_input(
        model: Path, reference: tuple[list[int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    for source in (str(path), "-"):
        assert generate(model, "--prompt-file", source) == 0
        assert capsys.readouterr().out == reference[1] + "\n"


def test_sampled_text_depends_on_the_seed_and_not_on_the_method(model: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    def sampled(seed: int, *how: str) -> list[int]:
        assert generate(model, PROMPT, "--json", "--temperature", "1", "--top-p", "0.9", "--seed", str(seed),
                        *how) == 0
        tokens: list[int] = json.loads(capsys.readouterr().out)["tokens"]
        return tokens

    one = sampled(1)
    assert one == sampled(1, "--strategy", "autoregressive")
    assert one == sampled(1, "--set", "rank=draft", "--set", "plus_width=7")
    assert one != sampled(2)
