"""Model directories: their parts, and errors that name a missing file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import tiny_llama

from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import resolve_model


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


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(target: Path, name: str) -> None:
    (target / name).unlink()
    with pytest.raises(UsageError, match=rf"target is incomplete: .*{name}.* is missing"):
        resolve_model(target.parent)


def test_a_broken_config_is_named(target: Path) -> None:
    (target / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is not valid JSON"):
        resolve_model(target.parent)


def test_a_gguf_file_is_told_from_a_damaged_model(tmp_path: Path) -> None:
    file = tmp_path / "model-q4.gguf"
    file.touch()
    for given in (file, tmp_path):
        with pytest.raises(UsageError, match=r"model-q4\.gguf'?: GGUF"):
            resolve_model(given)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model 'nowhere'"):
        resolve_model("nowhere")
