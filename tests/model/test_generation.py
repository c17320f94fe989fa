"""generation_config.json's sampling settings, and the user's, which take precedence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import ModelDir, choose_sampling, not_applied
from flowspec_edge.sampling.rule import Sampling

# As it comes with Llama-3.1-8B-Instruct, and with Qwen2-7B-Instruct.
LLAMA_3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [128001, 128008, 128009]}
QWEN_2 = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}


def model(path: Path, config: dict[str, Any] | None) -> ModelDir:
    if config is not None:
        (path / "generation_config.json").write_text(json.dumps(config))
    return ModelDir(path)


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
    assert set(origins) == {"temperature", "top_k", "top_p", "seed"}
    for name, origin in origins.items():
        assert origin == ("command line" if name in given else
                          "generation_config.json" if name in advised else "default")


@pytest.mark.parametrize(("config", "names"), [
    (LLAMA_3, []),
    (QWEN_2, ["repetition_penalty 1.05"]),
    ({"repetition_penalty": 1.0, "num_beams": 1, "min_p": 0.1, "bad_words_ids": None}, []),  # min_p draws
    ({"do_sample": True, "min_p": 0.1, "no_repeat_ngram_size": 3}, ["no_repeat_ngram_size 3", "min_p 0.1"]),
])
def test_what_is_not_applied_is_named(tmp_path: Path, config: dict[str, Any], names: list[str]) -> None:
    found = model(tmp_path, config)
    assert not_applied(found, choose_sampling(Sampling(), set(), found)[0]) == names


@pytest.mark.parametrize(("config", "says"), [
    ({"do_sample": True, "temperature": "hot"}, r"config\.json: temperature must be a number, not 'hot'"),
    ({"do_sample": True, "top_p": 1.5}, r"config\.json: top-p must be above 0 and at most 1, not 1\.5"),
])
def test_bad_advice_names_the_file(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        choose_sampling(Sampling(), set(), model(tmp_path, config))
