"""The catalogue: its names in ``plan``, ``models list`` and ``models fetch``, with a hub on loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kits.draft_heads import published_eagle3
from kits.family_checkpoints import family_dir
from kits.hub_server import hub
from kits.mtp_layers import with_mtp
from kits.tiny_model_dir import tiny_model_dir
from kits.tiny_models import tiny_llama
from transformers import AutoConfig

from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.cli.main import main
from flowspec_edge.model.catalogue import find_known, known_models
from flowspec_edge.model.chat import BUILT_IN, recognise
from flowspec_edge.model.opened import OpenModel, resolve_model


def flowspec(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flowspec_edge", *arguments], text=True, capture_output=True,
                          check=False, timeout=300, env={**os.environ, **environment})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOWSPEC_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "models"


@pytest.mark.parametrize("name", list(known_models()))
def test_an_entry_is_a_model_that_stages_run(name: str) -> None:
    known = known_models()[name]
    size = model_bytes(name, "fp16")
    assert (size.name, size.layers) == (name, known.config["num_hidden_layers"])
    assert find_known(known.target) == find_known(known.target.upper()) == (name, known)
    assert known.chat_template in (None, *BUILT_IN)
    assert set(known.config) <= set(AutoConfig.for_model(**known.config).to_dict()) | {"rope_theta",
                                                                                       "rope_scaling",
                                                                                       "num_experts"}


# Parameters of the published checkpoints, from their model cards or safetensors' indexes.
@pytest.mark.parametrize(("name", "parameters"), [
    ("llama-2-7b", 6_738_415_616), ("llama-2-13b", 13_015_864_320), ("llama-3-8b", 8_030_261_248),
    ("qwen2-7b", 7_615_616_512), ("qwen3-8b", 8_190_735_360), ("qwen3-4b", 4_022_468_096),
    ("qwen3-30b-a3b", 30_532_122_624),
    # Of OpenAI's model card: 20.91 and 116.83 billion, without the embeddings of the input.
    ("gpt-oss-20b", 20_914_757_184), ("gpt-oss-120b", 116_829_156_672),
])
def test_shapes_give_the_published_numbers_of_parameters(name: str, parameters: int) -> None:
    size = model_bytes(name, "fp16")
    tied = known_models()[name].config.get("tie_word_embeddings", False)
    embeddings = size.lm_head  # which stay in their file
    assert (size.target_weights + embeddings + size.lm_head * (not tied)) // 2 == parameters


def test_plan_knows_the_names_of_the_catalogue(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    for name in ("llama-2-7b", "qwen3-8b", "Qwen/Qwen3-8B"):
        assert main(["plan", "--model", name, "--devices", "agx-orin-64gb:3", "--no-predict", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert len(report["boards"]) == 3, report
    assert main(["plan", "--model", "lama-2-7b", "--devices", "orin-nano-8gb:5"]) == 2
    assert "did you mean llama-2-7b" in capsys.readouterr().err
    assert main(["generate", "x", "--model", "qwen3-8b"]) == 2
    assert "flowspec models fetch qwen3-8b" in capsys.readouterr().err


# Prints the commands' exit codes.  A process of its own, since the hub's client reads its environment once.
PLANS = """
import sys
from flowspec_edge.cli.main import main
arguments = ["--devices", "orin-nano-8gb:3", "--no-predict"]
print([main(["plan", "--model", name, *arguments]) for name in sys.argv[1:]])
"""


@pytest.mark.slow
def test_plan_fetches_config_json_alone(tmp_path: Path, place: Path) -> None:
    with hub({"someone/tiny": tiny_llama(tmp_path / "tiny", layers=4)}) as (address, asked):
        done = subprocess.run([sys.executable, "-c", PLANS, "someone/tiny", "someone/else"], text=True,
                              capture_output=True, check=False, timeout=300,
                              env={**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"})
    assert done.stdout.splitlines()[-1] == "[0, 2]", done.stderr
    assert "orin-nano-8gb-3" in done.stdout
    assert {path.rpartition("/")[2] for path in asked if "/someone/tiny/resolve/" in path} == {"config.json"}
    assert len(done.stderr.splitlines()) == 1
    assert "the hub does not provide it" in done.stderr


def test_a_fetched_model_has_a_name_everywhere(tmp_path: Path, place: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_model_dir(tmp_path / "source")
    found = find_known("llama-2-7b")
    assert found is not None
    known = found[1]
    head = known.heads["eagle2"]
    repositories = {known.target: source / "target", head: source / "eagle2"}
    with hub(repositories) as (address, asked):
        here = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        done = flowspec("models", "fetch", known.target.upper(), **here)  # by the hub's name, in any case
        assert done.returncode == 0, done.stderr
        assert resolve_model("llama-2-7b").draft("eagle2") == place / "llama-2-7b" / "eagle2"
        before = len(asked)
        assert flowspec("models", "fetch", "llama-2-7b", **here).returncode == 0
        assert len(asked) == before  # nothing is asked for twice
        shutil.rmtree(place / "llama-2-7b")
        del repositories[head]
        done = flowspec("models", "fetch", "llama-2-7b", **here)
        assert done.returncode == 2
        assert head in done.stderr.splitlines()[-1]
        assert main(["generate", "x", "--model", "llama-2-7b"]) == 2  # incomplete
        assert "flowspec models fetch llama-2-7b" in capsys.readouterr().err
        repositories[head] = source / "eagle2"
        assert flowspec("models", "fetch", "llama-2-7b", **here).returncode == 0
    assert recognise(OpenModel(place / "llama-2-7b")) == "llama-2"
    assert main(["models", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["llama-2-7b"]["here"]
    assert not rows["qwen3-8b"]["here"]
    assert rows["demo"]["here"]
    assert main(["models", "list"]) == 0
    assert "yuhuili/EAGLE-llama2-chat-7B" in capsys.readouterr().out
    assert main(["generate", "fn main", "--model", "llama-2-7b", "--clock", "virtual", "--stages", "2",
                 "--max-new-tokens", "4"]) == 0


def test_another_head_of_a_kind_takes_its_place(tmp_path: Path, place: Path) -> None:
    """The first one's files go, and stay away when the model is fetched again."""
    heads = {"AngelSlim/Qwen3-8B_eagle3": tmp_path / "first",
             "RedHatAI/Qwen3-8B-speculator.eagle3": tmp_path / "second"}
    for form, path in zip(("classic", "speculators"), heads.values(), strict=True):
        published_eagle3(path, 0, 24, 61, form=form)
        (path / f"{path.name}.json").write_text("{}")
    record = place / "qwen3-8b" / "fetched.json"
    with hub({"Qwen/Qwen3-8B": tiny_llama(tmp_path / "tiny"), **heads}) as (address, _):
        here = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        assert flowspec("models", "fetch", "qwen3-8b", **here).returncode == 0
        assert (place / "qwen3-8b" / "eagle3" / "first.json").is_file()
        second = list(heads)[1]
        for words in (["--head", second], []):
            done = flowspec("models", "fetch", "qwen3-8b", *words, **here)
            assert done.returncode == 0, done.stderr
            assert json.loads(record.read_text())["eagle3"] == second
            kept = {path.name for path in (place / "qwen3-8b" / "eagle3").glob("*.json")}
            assert kept == {"config.json", "second.json"}
    assert "transformer_layer_config" in (place / "qwen3-8b" / "eagle3" / "config.json").read_text()


def test_an_mtp_layer_comes_with_its_model(tmp_path: Path, place: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    name, target = "qwen3.6-27b", "Qwen/Qwen3.6-27B"
    source = with_mtp(family_dir("qwen3.5", tmp_path / "source") / "target")
    with hub({target: source}) as (address, _):
        done = flowspec("models", "fetch", name, HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
        assert done.returncode == 0, done.stderr
    assert json.loads((place / name / "fetched.json").read_text()) == {"target": target}
    assert resolve_model(name).draft("mtp") == place / name / "target"
    assert main(["models", "head", name, "--no-measure"]) == 0
    assert f"flowspec generate --model {name} --draft mtp" in capsys.readouterr().out


def test_what_cannot_be_fetched(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "fetch", "nothing"]) == 2
    assert "flowspec models list" in capsys.readouterr().err
    assert main(["models", "fetch", "qwen3-8b", "--head", "eagle2"]) == 2
    assert "only AngelSlim/Qwen3-8B_eagle3 (eagle3)" in capsys.readouterr().err
    assert main(["models", "fetch", "qwen3-8b", "--head", "RedHatAI/Qwen3-8B-speculator.peagle"]) == 2
    said = capsys.readouterr().err
    assert "a head in the format P-EAGLE, which cannot be run" in said
    assert "RedHatAI/Qwen3-8B-speculator.dflash2 (dflash)" in said
    assert "\n" not in said.strip()
