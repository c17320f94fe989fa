"""The catalogue: its names in ``plan``, ``models list`` and ``models fetch``, with a hub on loopback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
from kits.draft_heads import published_eagle3
from kits.family_checkpoints import family_dir
from kits.hub_server import Hub
from kits.mtp_layers import with_mtp
from kits.tiny_model_dir import tiny_model_dir
from kits.tiny_models import tiny_llama
from transformers import AutoConfig

from flowspec_edge.boards.planning.model_size import ModelBytes, model_bytes
from flowspec_edge.cli.main import main
from flowspec_edge.model.catalogue import find_known_model, known_models
from flowspec_edge.model.chat import BUILT_IN, recognise
from flowspec_edge.model.opened import OpenModel, resolve_model


@pytest.fixture(scope="module")
def one_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with closing(Hub(tmp_path_factory.mktemp("cache"))) as made:
        yield made


@pytest.fixture
def online(one_hub: Hub, place: Path) -> Hub:
    """The hub without repositories."""
    one_hub.repositories.clear()
    one_hub.asked.clear()
    return one_hub


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOWSPEC_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@cache
def size_of(name: str) -> ModelBytes:
    return model_bytes(name, "fp16")


@pytest.mark.parametrize("name", list(known_models()))
def test_an_entry_is_a_model_that_stages_run(name: str) -> None:
    known = known_models()[name]
    size = size_of(name)
    assert (size.name, size.layers) == (name, known.config["num_hidden_layers"])
    assert find_known_model(known.target) == find_known_model(known.target.upper()) == (name, known)
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
    size = size_of(name)
    tied = known_models()[name].config.get("tie_word_embeddings", False)
    embeddings = size.lm_head  # which stay in their file
    assert (size.target_weights + embeddings + size.lm_head * (not tied)) // 2 == parameters


def test_plan_knows_the_names_of_the_catalogue(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    for name in ("llama-2-7b", "qwen3-8b", "Qwen/Qwen3-8B"):
        assert main(["plan", "--model", name, "--devices", "agx-orin-64gb:3", "--no-predict", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert len(report["boards"]) == 3, report


def test_plan_fetches_config_json_alone(tmp_path: Path, online: Hub) -> None:
    online.repositories["someone/tiny"] = tiny_llama(tmp_path / "tiny", layers=4)
    given = ("--devices", "orin-nano-8gb:3", "--no-predict")
    code, out, _ = online.flowspec("plan", "--model", "someone/tiny", *given)
    assert (code, "orin-nano-8gb-3" in out) == (0, True)
    assert {path.rpartition("/")[2] for path in online.asked if "/someone/tiny/resolve/" in path} == {"config.json"}
    code, _, errors = online.flowspec("plan", "--model", "someone/else", *given)
    assert (code, len(errors.splitlines())) == (2, 1)
    assert "the hub does not provide it" in errors


def test_a_fetched_model_has_a_name_everywhere(tmp_path: Path, place: Path, online: Hub,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_model_dir(tmp_path / "source")
    found = find_known_model("llama-2-7b")
    assert found is not None
    known = found[1]
    head = known.heads["eagle2"]
    online.repositories.update({known.target: source / "target", head: source / "eagle2"})
    code, out, errors = online.flowspec("models", "fetch", known.target.upper())  # by the hub's name, in any case
    assert code == 0, errors
    assert 'flowspec generate --model llama-2-7b --chat "Hello"' in out
    assert resolve_model("llama-2-7b").draft("eagle2") == place / "llama-2-7b" / "eagle2"
    before = len(online.asked)
    assert online.flowspec("models", "fetch", "llama-2-7b")[0] == 0
    assert len(online.asked) == before  # nothing is asked for twice
    shutil.rmtree(place / "llama-2-7b")
    del online.repositories[head]
    code, _, errors = online.flowspec("models", "fetch", "llama-2-7b")
    assert code == 2
    assert head in errors.splitlines()[-1]
    assert main(["generate", "x", "--model", "llama-2-7b"]) == 2  # incomplete
    assert "flowspec models fetch llama-2-7b" in capsys.readouterr().err
    online.repositories[head] = source / "eagle2"
    assert online.flowspec("models", "fetch", "llama-2-7b")[0] == 0
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


def test_another_head_of_a_kind_takes_its_place(tmp_path: Path, place: Path, online: Hub) -> None:
    """The first one's files go, and stay away when the model is fetched again."""
    heads = {"AngelSlim/Qwen3-8B_eagle3": tmp_path / "first",
             "RedHatAI/Qwen3-8B-speculator.eagle3": tmp_path / "second"}
    for form, path in zip(("classic", "speculators"), heads.values(), strict=True):
        published_eagle3(path, 0, 24, 61, form=form)
        (path / f"{path.name}.json").write_text("{}")
    record = place / "qwen3-8b" / "fetched.json"
    online.repositories.update({"Qwen/Qwen3-8B": tiny_llama(tmp_path / "tiny"), **heads})
    assert online.flowspec("models", "fetch", "qwen3-8b")[0] == 0
    assert (place / "qwen3-8b" / "eagle3" / "first.json").is_file()
    second = list(heads)[1]
    for words in (["--head", second], []):
        code, _, errors = online.flowspec("models", "fetch", "qwen3-8b", *words)
        assert code == 0, errors
        assert json.loads(record.read_text())["eagle3"] == second
        kept = {path.name for path in (place / "qwen3-8b" / "eagle3").glob("*.json")}
        assert kept == {"config.json", "second.json"}
    assert "transformer_layer_config" in (place / "qwen3-8b" / "eagle3" / "config.json").read_text()


def test_an_mtp_layer_comes_with_its_model(tmp_path: Path, place: Path, online: Hub,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    name, target = "qwen3.6-27b", "Qwen/Qwen3.6-27B"
    source = with_mtp(family_dir("qwen3.5", tmp_path / "source") / "target")
    online.repositories[target] = source
    code, _, errors = online.flowspec("models", "fetch", name)
    assert code == 0, errors
    assert json.loads((place / name / "fetched.json").read_text()) == {"target": target}
    assert resolve_model(name).draft("mtp") == place / name / "target"
    assert main(["models", "head", name, "--no-measure"]) == 0
    assert f"flowspec generate --model {name} --draft mtp" in capsys.readouterr().out
