"""The demonstration model is what its card says, and as good as every later figure needs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowspec_edge.d0.request import Request, Result
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.lab.spd.module import load_module
from flowspec_edge.lab.spd.training import depths, speculate
from flowspec_edge.lab.training.target import load_target
from flowspec_edge.model.opened import OpenModel, resolve_model
from flowspec_edge.strategies.params import Params
from flowspec_edge.util.resources import resource_dir

PROMPTS = 3


@pytest.fixture(scope="module")
def demo() -> OpenModel:
    return resolve_model("demo")


def prompts(demo: OpenModel) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(demo.target)
    lines = (resource_dir("models") / "demo" / "prompts.jsonl").read_text().splitlines()
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines[:PROMPTS]]


def card_of(directory: Path) -> dict[str, Any]:
    lines = (line.split(" = ", 1) for line in (directory / "card.toml").read_text().splitlines())
    return {key: json.loads(value) for key, value in lines}


def test_it_is_small(demo: OpenModel) -> None:
    assert demo.size <= 40e6


@pytest.mark.parametrize("part", ["target", "draft-lm"])
def test_transformers_loads_it(demo: OpenModel, part: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.path / part)
    model = AutoModelForCausalLM.from_pretrained(demo.path / part)
    text = "def read(path):\n    return path  # ünïcode ✓"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize("part", ["target", "draft-lm"])
def test_other_readers_find_what_they_need(demo: OpenModel, part: str) -> None:
    """read_target.py tries versions of transformers: 4.46 and 4.53 refuse the class name that 5 writes."""
    config = json.loads((demo.path / part / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    weights = load_file(demo.path / part / "model.safetensors")
    # EAGLE's loader reads the index
    index = json.loads((demo.path / part / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(weights, "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())


@pytest.mark.soak
def test_spds_module_is_what_its_card_says(demo: OpenModel) -> None:
    """Its size; and the agreement that its card reports is the share of tokens that SPD foresees in a run."""
    assert demo.draft("spd") is not None
    card = card_of(demo.draft("spd"))
    module = load_module(demo.draft("spd"), torch.float32)
    assert card["parameters"] == sum(p.numel() for p in module.parameters())
    assert card["bytes"] <= 8e6
    # With a full pipeline it foresees about as many of the answers' tokens as in a run.
    target = load_target(demo)
    foreseen = tokens = hits = 0
    for result, prompt in zip(run(demo, "spd"), prompts(demo), strict=True):
        foreseen, tokens = foreseen + result.stats.accepted, tokens + len(result.tokens) - 1
        ids = torch.tensor([[*prompt, *result.tokens]])
        with torch.no_grad():
            states = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
            out = speculate(module, states, depths(module.target_layers, 4), torch.tensor([4]))
            agrees = module.lm_head(out).argmax(-1)[0, len(prompt):-1] == ids[0, len(prompt) + 1:]
        hits += int(agrees.sum())
    assert foreseen / tokens == pytest.approx(hits / tokens, abs=0.06)


def test_the_deep_head_fits_its_card_and_is_lossless(demo: OpenModel) -> None:
    deep, first = demo.draft("eagle2-deep"), demo.draft("eagle2")
    assert deep is not None
    assert first is not None
    card = card_of(deep)
    assert "a demonstration" in card["summary"]
    files = [path for path in deep.iterdir() if path.name != "card.toml"]
    assert card["bytes"] == sum(path.stat().st_size for path in files) <= 1e6
    weights = load_file(deep / "model.safetensors")
    assert card["parameters"] == sum(w.numel() for w in weights.values())
    # It is the first head, trained on: its weights are like, where those of another head are not (0.02).
    for name, old in load_file(first / "model.safetensors").items():
        if name in weights and old.dim() == 2:
            likeness = torch.cosine_similarity(weights[name].float().flatten(), old.float().flatten(), dim=0)
            assert likeness > 0.2
    cluster = VirtualCluster(demo.path, 4, load_profile("paper-7b"))
    request = Request(prompts(demo)[0], "flowspec", 48, stop_ids=demo.stop_ids)
    drafted = cluster.generate(replace(request, params=Params(draft="eagle2-deep")))
    assert drafted.tokens == cluster.generate(replace(request, strategy="autoregressive")).tokens
    assert drafted.stats.accepted > 0.6 * card["agreement_greedy"][0] * len(drafted.tokens)


def run(demo: OpenModel, strategy: str) -> list[Result]:
    cluster = VirtualCluster(demo.path, 4, load_profile("paper-7b"))
    return [cluster.generate(Request(p, strategy, 48, stop_ids=demo.stop_ids)) for p in prompts(demo)]


def per_second(results: list[Result]) -> float:
    return sum(r.stats.tokens_per_second for r in results) / len(results)


@pytest.mark.slow
def test_chunk_pp_accepts_enough_and_flowspec_outruns_it(demo: OpenModel) -> None:
    """The papers' claim in virtual time, which does not depend on the machine that runs the test."""
    chunk, flowspec = run(demo, "chunk_pp"), run(demo, "flowspec")
    tokens = sum(len(r.tokens) - 1 for r in chunk)
    assert tokens / sum(r.stats.rounds for r in chunk) >= 4.0
    assert per_second(flowspec) >= 1.5 * per_second(chunk)
    assert [r.tokens for r in flowspec] == [r.tokens for r in chunk]
