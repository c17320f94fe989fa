"""Two sources of one model's weights: the choice is transformers', or both are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from kits.sharded_models import all_tensors, as_bin, cut
from kits.tiny_model_dir import tiny_model_dir
from kits.tiny_models import tiny_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec_edge.drafting.checkpoint import read_weights
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.opened import OpenModel, resolve_model
from flowspec_edge.model.weights import located
from flowspec_edge.model.weights.checkpoint import Checkpoint
from flowspec_edge.sampling.rule import Sampling

SAFE, BIN = "model.safetensors", "pytorch_model.bin"
NORM = "model.norm.weight"  # of which every source has its own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=2, hidden=32)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    located.warn_once.cache_clear()
    return Path(shutil.copytree(model, tmp_path / "model"))


def add(directory: Path, source: str, value: float) -> None:
    """Write a further, whole source of weights, whose norm is ``value`` everywhere."""
    tensors = load_file(directory / "original")
    tensors[NORM] = torch.full_like(tensors[NORM], value)
    save = torch.save if "bin" in source else save_file
    if source.endswith(located.INDEX):
        stem, suffix = source.removesuffix(located.INDEX).rsplit(".", 1)
        names = sorted(tensors)
        parts = {f"{stem}-{i + 1:05d}-of-00002.{suffix}": names[i::2] for i in (0, 1)}
        for file, held in parts.items():
            part = {name: tensors[name] for name in held}
            save(part, directory / file, **({} if suffix == "bin" else {"metadata": {"format": "pt"}}))
        index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
        (directory / source).write_text(json.dumps(index))
    else:
        save(tensors, directory / source, **({} if "bin" in source else {"metadata": {"format": "pt"}}))


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_the_choice_is_that_of_transformers(copy: Path, first: int, second: int,
                                            caplog: pytest.LogCaptureFixture) -> None:
    (copy / SAFE).rename(copy / "original")
    for place in {first, second}:
        add(copy, located.WEIGHTS[place], place + 1.0)
    (copy / "consolidated.safetensors").write_bytes(b"Mistral's own")
    theirs = AutoModelForCausalLM.from_pretrained(copy).state_dict()[NORM][0]
    assert Checkpoint(copy).tensors([NORM])[NORM][0] == theirs == min(first, second) + 1
    head = read_weights(copy, "a draft model")
    assert head[NORM].read()[0] == theirs
    resolve_model(copy)
    kinds = {place // 2 for place in (first, second)}
    warned = first != second and len(kinds) == 1  # safetensors beside .bin are published so
    assert (len(caplog.messages) == 1) == warned, caplog.messages
    if warned:
        single, index = located.WEIGHTS[min(first, second)], located.WEIGHTS[max(first, second)]
        assert f"the weights are those of {single}; not read: {index}, " in caplog.text
        assert "00001-of-00002" in caplog.text


def test_an_index_of_the_one_file_is_no_second_source(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = load_file(copy / SAFE)
    (copy / f"{SAFE}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, SAFE)}))
    resolve_model(copy)
    assert not caplog.messages


def test_files_that_an_index_does_not_name_are_named(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    (copy / SAFE).rename(copy / "original")
    add(copy, f"{SAFE}.index.json", 2.0)
    for i in range(5):
        save_file({"x": torch.ones(1)}, copy / f"model-{i:05d}-of-00005.safetensors")
    resolve_model(copy)
    assert caplog.messages == [
        f"{copy}: the weights are those of model.safetensors.index.json; not read: model-00000-of-00005."
        "safetensors, model-00001-of-00005.safetensors, model-00002-of-00005.safetensors and 2 more; delete "
        "what is out of date"]


def test_a_file_that_an_index_names_is_missed_at_once(copy: Path) -> None:
    as_bin(copy, 3)
    (copy / "pytorch_model-00002-of-00003.bin").unlink()
    for tried in (resolve_model, Checkpoint, lambda path: read_weights(path, "a draft model")):
        with pytest.raises(FlowspecError, match=r"00002-of-00003\.bin is missing, which pytorch_model\."):
            tried(copy)


def test_an_adapter_beside_a_model_is_named(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    (copy / "adapter_config.json").write_text("{}")
    resolve_model(copy)
    assert "the adapter beside them (adapter_config.json) is not applied" in caplog.text


def test_only_what_is_read_of_a_head_goes_to_boards(tmp_path: Path) -> None:
    whole = tiny_model_dir(tmp_path / "whole", layers=2, hidden=32)
    home = whole / "eagle2"
    for name in ("model-00001-of-00001.safetensors", BIN, "optimizer.bin"):
        (home / name).write_bytes(b"old")
    index = {"weight_map": {"x": "model-00001-of-00001.safetensors"}}
    (home / f"{SAFE}.index.json").write_text(json.dumps(index))
    cut(whole, tmp_path / "out")
    copied = sorted(path.name for path in OpenModel(tmp_path / "out").draft("eagle2").iterdir())
    assert copied == ["config.json", SAFE]


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
def test_an_lm_head_beside_tied_embeddings(tmp_path: Path, same: bool, sharded: bool,
                                           caplog: pytest.LogCaptureFixture) -> None:
    """transformers uses a stored lm_head with values of its own, whatever config.json ties."""
    path = tiny_llama(tmp_path / "model", layers=2, hidden=32)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(path / SAFE)
    if same:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path / SAFE, {"format": "pt"})
    prompt = [5, 7, 11, 13]
    theirs = AutoModelForCausalLM.from_pretrained(path)
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    ours = path
    if sharded:
        cut(path, ours := tmp_path / "out", dtype="fp32")
        stored = all_tensors(ours / "draft" / "target")
        assert set(stored) == {"model.embed_tokens.weight" if same else "lm_head.weight"}
        assert ("ties lm_head.weight to model.embed_tokens.weight" in caplog.text) != same
    found, _ = PlainDecoder(ours, "fp32").generate(prompt, 8, Sampling(), frozenset())
    assert found == expected[0, len(prompt):].tolist()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["bare", "float8", "no positions", "one matrix"])
def test_checkpoints_that_transformers_completes(copy: Path, tmp_path: Path, kind: str, sharded: bool
                                                 ) -> None:
    tensors, config = load_file(copy / SAFE), json.loads((copy / "config.json").read_text())
    if kind == "bare":
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    elif kind == "float8":
        config["torch_dtype"] = config["dtype"] = "float8_e4m3fn"
        tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    elif kind == "one matrix":  # of a tied model, under the output's name
        config["tie_word_embeddings"] = True
        del tensors["model.embed_tokens.weight"]
    else:
        del config["max_position_embeddings"]
    save_file(tensors, copy / SAFE, {"format": "pt"})
    (copy / "config.json").write_text(json.dumps(config))
    theirs = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).state_dict()
    truth = {f"model.{name}" if kind == "bare" and not name.startswith("lm_head.") else name: tensor.float()
             for name, tensor in tensors.items()}
    truth.setdefault("model.embed_tokens.weight", truth["lm_head.weight"])
    assert all(torch.equal(theirs[name], tensor) for name, tensor in truth.items())
    assert resolve_model(copy).max_positions == 2048
    ours = copy
    if sharded:
        cut(copy, ours := tmp_path / "out", dtype="fp32")
    decoder = PlainDecoder(ours, "fp32")
    found = decoder.model.state_dict()
    assert decoder.generate([5, 7], 4, Sampling(), frozenset())
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", NORM, "lm_head.weight"):
        assert torch.equal(found[name].float(), truth[name]), name


def test_a_decoder_without_its_lm_head_is_named(copy: Path) -> None:
    tensors = load_file(copy / SAFE)
    del tensors["lm_head.weight"]
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, copy / SAFE,
              {"format": "pt"})
    with pytest.raises(FlowspecError, match=r"no tensor lm_head\.weight, and config\.json does not tie it"):
        cut(copy, copy / "out")
    (copy / SAFE).unlink()
    with pytest.raises(UsageError, match="incomplete"):
        resolve_model(copy)
