"""A sharded model on the command line: it decides what the options leave open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.cli.main import main


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=5)


@pytest.fixture(scope="module")
def cut(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cut") / "model"
    assert main(["models", "shard", "--model", str(whole), "--split", "2,1,2", "--dtype", "fp32",
                 "--out", str(out)]) == 0
    return out


def generate(model: Path, *options: str) -> int:
    return main(["generate", "x = 1", "--model", str(model), "--clock", "virtual", "--max-new-tokens", "8",
                 "--json", *options])


def test_stages_are_those_of_the_cut(whole: Path, cut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(whole) == generate(cut) == 0
    one, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert other["tokens"] == one["tokens"]
    assert (len(one["stats"]["stages"]), len(other["stats"]["stages"])) == (4, 3)


def test_a_group_computes_the_whole_of_a_cut_model(cut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(cut) == generate(cut, "--strategy", "megatron") == 0
    one, group = map(json.loads, capsys.readouterr().out.splitlines())
    assert group["tokens"] == one["tokens"]
    assert len({stage["compute_s"] for stage in group["stats"]["stages"]}) == 1


def test_a_benchmark_checks_it_against_its_own_weights(cut: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["bench", "run", "--model", str(cut), "--strategies", "flowspec,chunk_pp", "--limit", "1",
                 "--max-new-tokens", "6", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (report["settings"]["stages"], report["settings"]["dtype"]) == (3, "fp32")
    assert len(report["rows"]) == 2


def test_the_loss_is_measured_on_the_gpu_if_there_is_one(whole: Path, cut: Path, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    """By default as with --device auto, which is the CPU here unless PyTorch sees a GPU."""
    text = tmp_path / "text.txt"
    text.write_text("for i in range(10): print(i)\n" * 4)
    command = ["models", "loss", str(cut), "--against", str(whole), "--text", str(text), "--tokens", "32",
               "--json"]
    assert main(command) == main([*command, "--device", "auto"]) == 0
    first, second = capsys.readouterr().out.split("]\n[")
    assert first.strip("[]\n") == second.strip("[]\n")
    if not torch.cuda.is_available():
        assert main([*command, "--device", "cuda"]) == 2
        assert "--device cuda: " in capsys.readouterr().err
