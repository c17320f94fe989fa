"""``flowspec demo`` with a tiny model: real processes, then virtual time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kits.tiny_model_dir import tiny_model_dir
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowspec_edge.cli.common.workload import demo_prompts
from flowspec_edge.cli.generate.demo import choose_prompts
from flowspec_edge.cli.main import main
from flowspec_edge.lab.bench.tasks import load_prompts


def test_streams_over_processes_then_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model_dir(tmp_path, layers=2, hidden=32)
    capsys.readouterr()
    few = ("--stages", "2", "--limit", "2", "--max-new-tokens", "8", "--seconds", "1000")
    assert main(["demo", "--model", str(model), *few]) == 0
    out = capsys.readouterr().out

    (prompt,) = (prompt.text for prompt in choose_prompts(load_prompts(demo_prompts()), 1))
    tokenizer = AutoTokenizer.from_pretrained(model / "target")
    target = AutoModelForCausalLM.from_pretrained(model / "target")
    ids = tokenizer(prompt, return_tensors="pt")
    new = target.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert prompt + tokenizer.decode(new) in out

    assert "FlowSpec over 3 processes" in out
    virtual, wall = out.split("VIRTUAL TIME under paper-7b, 2 stages")[1].split("wall clock on this machine")
    for part in (virtual, wall):
        for strategy in ("flowspec_plus", "flowspec", "chunk_pp", "autoregressive"):
            assert strategy in part
        assert "weights and arithmetic in fp32" in " ".join(part.split())
        assert len(re.findall(r" 0/\d+ +0/\d+ *$", part, re.MULTILINE)) == 4
    assert (f"0 of 12 answers and 0 of {4 * 8 + 4 * 16} tokens differ from plain decoding's (weights and "
            "arithmetic in fp32).") in " ".join(out.split())


def test_little_time_leaves_measurements_out_and_says_which(tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model_dir(tmp_path, layers=2, hidden=32)
    capsys.readouterr()
    few = ("--stages", "2", "--max-new-tokens", "4", "--seconds", "1")
    assert main(["demo", "--model", str(model), *few]) == 0
    out = " ".join(capsys.readouterr().out.split())
    # A fast machine leaves less out.
    [measured] = re.findall(r"(\d) held-out prompts", out)
    here = 4 - out.count(" over processes,") - out.count(" over processes.")
    assert (f"{4 - int(measured)} of 4 prompts in virtual time." in out) == (measured != "4")
    assert ("Left out, since 1 s were over (--seconds): " in out) == (here < 4 or measured != "4")
    assert here >= 2
    answers, tokens = here + int(measured) * 4, here * 4 + int(measured) * 4 * 4
    assert f"0 of {answers} answers and 0 of {tokens} tokens differ from plain decoding's" in out


def test_without_the_model_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("flowspec: error: no model 'nowhere'")


def test_the_picked_prompts_come_first_and_none_is_lost() -> None:
    prompts = load_prompts(demo_prompts())
    chosen = choose_prompts(prompts, len(prompts))
    assert [prompt.id for prompt in chosen[:4]] == ["13", "46", "60", "7"]
    assert {prompt.id for prompt in chosen} == {prompt.id for prompt in prompts}
