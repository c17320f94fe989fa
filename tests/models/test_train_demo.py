"""The demonstration recipe from end to end: killed and resumed, the weights are those of a run left alone."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from train_demo import train_demo
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowspec_edge.errors import UsageError

_PROGRAM = Path(__file__).resolve().parents[2] / "models/recipe/train_demo.py"
_WEIGHTS = [f"{part}/model.safetensors" for part in ("target", "eagle2", "draft-lm")]


def start(out, work):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
                   "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(_PROGRAM), "--out", str(out), "--work", str(work), "--quick"]
    return subprocess.Popen(command, text=True, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)


def finish(out, work):
    with start(out, work) as process:
        text = process.stdout.read()
    assert process.returncode == 0, text
    return text


def kill_after(out, work, line):
    with start(out, work) as process:
        seen = []
        for text in process.stdout:
            seen.append(text)
            if line in text:
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL, "".join(seen)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out, work = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("work")
    text = finish(out, work)
    assert "target step 25/75: loss" in text  # lines take the bar's place where there is no terminal
    return out, work


@pytest.mark.soak
def test_killed_twice_and_resumed_gives_the_same_weights(whole, tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    for name in ("corpus.json", "tokenizer.json", "train.npy", "held_out.npy"):
        shutil.copy(whole[1] / name, work)
    kill_after(out, work, "target step 50/75")
    assert not (out / "target").exists()
    kill_after(out, work, "eagle2 step 50/75")
    assert (out / "target").exists()
    assert not (out / "eagle2").exists()
    text = finish(out, work)
    assert f"{out / 'target'} is finished already" in text
    assert "eagle2 step 25/75" not in text
    for name in _WEIGHTS:
        assert (out / name).read_bytes() == (whole[0] / name).read_bytes(), name
    assert (out / "card.toml").read_text() == (whole[0] / "card.toml").read_text()


@pytest.mark.soak
def test_what_came_out_loads_and_is_described(whole):
    out = whole[0]
    for part in ("target", "draft-lm"):
        assert AutoModelForCausalLM.from_pretrained(out / part).config.vocab_size == 320
        assert AutoTokenizer.from_pretrained(out / part).vocab_size == 320
    assert (out / "README.md").is_file()


@pytest.mark.soak
def test_a_finished_model_is_left_alone(whole, capsys):
    out, work = whole
    before = {name: (out / name).stat().st_mtime_ns for name in _WEIGHTS}
    train_demo(out, work=work, quick=True)
    assert "is complete" in capsys.readouterr().out
    assert before == {name: (out / name).stat().st_mtime_ns for name in _WEIGHTS}
    with pytest.raises(UsageError, match="work of another recipe"):
        train_demo(out, work=work)
    with pytest.raises(UsageError, match="model of another recipe"):
        train_demo(out, work=out.parent / "elsewhere")
