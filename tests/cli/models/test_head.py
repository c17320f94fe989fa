"""``flowspec models head``: its ways, their commands, and the estimate of a training."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.command_options import refusal
from kits.tiny_models import tiny_llama
from torch.utils.flop_counter import FlopCounterMode

from flowspec_edge.cli.main import main
from flowspec_edge.lab.training import cost
from flowspec_edge.lab.training.eagle import EagleRecipe
from flowspec_edge.lab.training.heads import optimiser_for
from flowspec_edge.model.config import load_config


@pytest.fixture(autouse=True)
def no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWSPEC_MODELS", str(tmp_path / "models"))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["models", "head", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusals(found: Any) -> list[str]:
    """What is wrong with the commands that are shown."""
    commands = [shlex.split(command) for way in found["choices"] for command in way["commands"]]
    assert all(command[0] in ("flowspec", "hf") for command in commands)
    return [said for program, *words in commands if program == "flowspec" and (said := refusal(words))]


@pytest.mark.parametrize(("model", "kinds"), [
    ("llama-2-7b", ["EAGLE-llama2-chat-7B (eagle2)", "TinyLlama"]),
    ("Qwen/Qwen3-8B", ["(eagle3)", "Qwen3-0.6B"]),
    ("qwen3.6-35b-a3b", ["own MTP layer", "same tokenizer"]),
    ("qwen3.8-27b", ["(dflash; licence", "same tokenizer"]),
])
def test_the_ways_of_a_model_of_the_catalogue(capsys: pytest.CaptureFixture[str], model: str, kinds: list[str]
                                              ) -> None:
    found = shown(capsys, model, "--no-measure", "--stages", "3")
    assert [(way["way"], way["ready"]) for way in found["choices"]] == [
        ("ngram", False), ("head", False), ("small model", False), ("train", False)]
    assert all(kind in found["choices"][i + 1]["text"] for i, kind in enumerate(kinds))
    assert not refusals(found)
    assert found["choices"][1]["commands"][0] == f"flowspec models fetch {found['model']}"
    assert found["training"] is None


def test_a_checkpoint_without_any_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny_llama(tmp_path / "tiny", layers=4))
    found = shown(capsys, path, "--steps", "7")
    assert found["choices"][0]["ready"]
    assert "the catalogue knows none" in found["choices"][1]["text"]
    assert not refusals(found)
    training = found["training"]
    assert (training["steps"], training["tokens"], training["fits"]) == (7, 7 * 4096, True)
    assert training["hours"] == pytest.approx(7 * training["step_s"] / 3600, abs=1e-4)
    assert main(["models", "head", path, "--steps", "7"]) == 0
    printed, said = capsys.readouterr()
    assert "timing a training step here, for the hours of choice 4; --no-measure leaves it out" in said
    assert re.findall(r"(?m)^\d", printed) == ["1", "2", "3", "4"]
    assert "n-grams" in printed
    assert "for 7 steps (0.0287 million tokens)" in printed
    assert f"--model {path} --kind eagle2" in printed


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_counted_operations_are_those_that_torch_counts(tmp_path: Path, kind: str) -> None:
    """Of a step that runs; attention and small products are left out of the count."""
    config = load_config(tiny_llama(tmp_path / "tiny", layers=4, hidden=128))
    recipe = EagleRecipe(steps=1, window=32, tokens_per_step=128, micro_batch=128, depth=3, chains=8)
    cpu = torch.device("cpu")
    student = cost._student(config, kind, recipe, cpu)
    rows, noise, anchors = cost._batch(4, config, recipe, cpu)
    with FlopCounterMode(display=False) as counter:
        student.step_loss(recipe.fade, rows, student.read(rows), noise, anchors, recipe.depth).backward()
        optimiser_for(recipe, student.head).step(0, 1)
    counted, _ = cost._counted(cost._Step(config, 4, ""), kind, recipe, recipe.depth)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.15)
