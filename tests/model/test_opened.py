"""Model directories: their parts, errors that name a missing file or an impossible field of config.json, and
generation_config.json's sampling settings, over which the user's take precedence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kits.tiny_models import tiny_llama

from flowspec_edge.errors import UsageError
from flowspec_edge.model.config import check_config, load_config, position_limit
from flowspec_edge.model.opened import OpenModel, choose_sampling, not_applied, resolve_model
from flowspec_edge.sampling.rule import Sampling


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "mine" / "target", layers=3, hidden=32)


def test_facts_come_from_the_config(target: Path) -> None:
    model = resolve_model(target.parent)
    assert (model.name, model.layers, model.hidden_width, model.max_positions) == ("mine", 3, 32, 2048)
    assert model.stop_ids == {0}
    assert model.draft("eagle2") is None
    assert model.draft("lm") is None
    assert model.draft("spd") is None
    assert model.size > 10_000


@pytest.mark.parametrize(("generation", "config", "expected"), [
    ([3, 5], 0, {3, 5}), (7, 0, {7}), (None, [1, 2], {1, 2}), (None, None, set()),
])
def test_stop_ids_prefer_the_generation_config(target: Path, generation: object, config: object,
                                               expected: set[int]) -> None:
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        path = target / name
        data = json.loads(path.read_text()) | {"eos_token_id": value}
        path.write_text(json.dumps(data))
    assert resolve_model(target.parent).stop_ids == expected


@pytest.mark.parametrize(("name", "advice"), [
    ("config.json", ""), ("model.safetensors", ": copy the checkpoint's weights there"),
    ("tokenizer.json", ": copy it, with tokenizer_config.json, from the model that this one was tuned from")])
def test_a_missing_file_is_named(target: Path, name: str, advice: str) -> None:
    (target / name).unlink()
    with pytest.raises(UsageError, match=rf"target is incomplete: .*{name}.* is missing{advice}$"):
        resolve_model(target.parent)


def test_a_broken_config_is_named(target: Path) -> None:
    (target / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is not valid JSON"):
        resolve_model(target.parent)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model 'nowhere'"):
        resolve_model("nowhere")


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size",
         "max_position_embeddings")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [-5, 0, 10**12, "7", None, 7.0, True, [7], float("nan")])
def test_a_size_is_a_whole_number_in_its_range(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"config\.json: {name} must be a whole number from 1 to"):
        check_config({"model_type": "llama", name: value}, tmp_path / "config.json")


@pytest.mark.parametrize(("name", "value"), [
    ("rms_norm_eps", 0), ("rms_norm_eps", "1e-6"), ("rope_theta", float("inf")), ("max_window_layers", -1),
    ("layer_types", "full_attention"), ("layer_types", [1]), ("eos_token_id", "</s>"),
    ("eos_token_id", [1, {}]),
    ("head_dim", 0), ("num_key_value_heads", -1), ("sliding_window", 0.5),
])
def test_other_fields(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"c: {name} must be"):
        check_config({name: value}, Path("c"))


def test_values_that_models_have() -> None:
    check_config({"sliding_window": None, "head_dim": None, "num_key_value_heads": None, "eos_token_id": None,
                  "rope_theta": 1_000_000, "max_position_embeddings": 131072, "vocab_size": 256_000,
                  "layer_types": ["full_attention"], "max_window_layers": 0}, Path("c"))


@pytest.mark.parametrize(("config", "limit"), [
    # What the hub's config.json files say, shortened.
    ({"model_type": "llama", "max_position_embeddings": 4096}, 4096),  # Llama-2-7b
    ({"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096}, 32768),  # v0.1
    ({"model_type": "qwen2", "num_hidden_layers": 28, "max_position_embeddings": 32768,
      "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 21}, 32768),
])
def test_a_window_is_no_limit(tmp_path: Path, config: dict[str, Any], limit: int) -> None:
    assert position_limit(config) == limit
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert position_limit(load_config(tmp_path).to_dict()) == limit
    assert OpenModel(tmp_path).max_positions == limit


# As it comes with Llama-3.1-8B-Instruct, and with Qwen2-7B-Instruct.
LLAMA_3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [128001, 128008, 128009]}
QWEN_2 = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}


def model(path: Path, config: dict[str, Any] | None) -> OpenModel:
    if config is not None:
        (path / "generation_config.json").write_text(json.dumps(config))
    return OpenModel(path)


@pytest.mark.parametrize(("config", "asked", "given", "expected", "advised"), [
    (None, Sampling(), set(), Sampling(), set()),
    ({"temperature": 0.9, "top_p": 0.6}, Sampling(), set(), Sampling(), set()),  # Llama-2's first release
    ({"do_sample": False, "temperature": 0.9}, Sampling(), set(), Sampling(), set()),
    (LLAMA_3, Sampling(), set(), Sampling(0.6, top_p=0.9), {"temperature", "top_p"}),
    (QWEN_2, Sampling(), set(), Sampling(0.7, 20, 0.8), {"temperature", "top_k", "top_p"}),
    (QWEN_2, Sampling(), {"temperature"}, Sampling(0.0, 20, 0.8), {"top_k", "top_p"}),
    (QWEN_2, Sampling(1.5, 5, seed=3), {"temperature", "top_k", "seed"}, Sampling(1.5, 5, 0.8, 3), {"top_p"}),
    ({"do_sample": True}, Sampling(), set(), Sampling(1.0), {"temperature"}),
    ({"do_sample": True, "top_k": -1}, Sampling(), set(), Sampling(1.0), {"temperature", "top_k"}),
])
def test_advice_fills_in_what_is_not_given(tmp_path: Path, config: dict[str, Any] | None, asked: Sampling,
                                           given: set[str], expected: Sampling, advised: set[str]) -> None:
    sampling, origins = choose_sampling(asked, given, model(tmp_path, config))
    assert sampling == expected
    assert set(origins) == {"temperature", "top_k", "top_p", "seed", "min_p"}
    for name, origin in origins.items():
        assert origin == ("command line" if name in given else
                          "generation_config.json" if name in advised else "default")


@pytest.mark.parametrize(("config", "names"), [
    (LLAMA_3, []),
    (QWEN_2, ["repetition_penalty 1.05"]),
    ({"repetition_penalty": 1.0, "num_beams": 1, "typical_p": 0.1, "bad_words_ids": None}, []),
    ({"do_sample": True, "min_p": 0.1, "typical_p": 0.5}, ["typical_p 0.5"]),
])
def test_what_is_not_applied_is_named(tmp_path: Path, config: dict[str, Any], names: list[str]) -> None:
    found = model(tmp_path, config)
    assert not_applied(found, choose_sampling(Sampling(), set(), found)[0]) == names


@pytest.mark.parametrize(("config", "says"), [
    ({"do_sample": True, "temperature": "hot"}, r"config\.json: temperature must be a number, not 'hot'"),
    ({"do_sample": True, "top_p": 1.5}, r"config\.json: top-p must be from 0 \(greedy\) to 1 .*not 1\.5"),
])
def test_bad_advice_names_the_file(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        choose_sampling(Sampling(), set(), model(tmp_path, config))
