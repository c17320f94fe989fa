"""Every strategy gives the tokens of plain decoding: virtual time, real models, every stage count.

The reference is transformers' unsharded model: its own ``generate`` for greedy text, the
shared-noise rule on its logits for sampled text.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache, lru_cache
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.cases import pairwise, strategies
from kits.virtual_clusters import cluster
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowspec_edge.d0.request import Request
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling, log_probs
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES
from flowspec_edge.util.resources import resource_dir

STAGES = tuple(range(1, 9))
SAMPLINGS = {
    "greedy": Sampling(),
    "T=1": Sampling(temperature=1.0, seed=11),
    "top-p": Sampling(temperature=1.0, top_p=0.9, seed=12),
}
PROMPTS = 50
THOROUGH = ("flowspec", "flowspec_plus")
VARIANTS = range(3)  # of prompts and parameters
# Any two of a stage count, a variant and a sampling meet; the strategies take turns, each with two cases at least.
WAYS = pairwise(STAGES, VARIANTS, list(SAMPLINGS))
TINY = [(list(STRATEGIES)[i % len(STRATEGIES)], *WAYS[i % len(WAYS)]) for i in range(2 * len(STRATEGIES))]


@lru_cache(maxsize=4)
def plain(model: Path) -> PlainDecoder:
    return PlainDecoder(model)


@lru_cache(maxsize=1)
def prompts(model: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model / "target")
    lines = (resource_dir("models") / "demo" / "prompts.jsonl").read_text().splitlines()
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines[:PROMPTS]]


@cache
def expected_text(model: Path, prompt: tuple[int, ...], limit: int, sampling: Sampling,
                  stop: frozenset[int]) -> tuple[list[int], str]:
    """Plain decoding, once for all strategies."""
    return plain(model).generate(list(prompt), limit, sampling, stop)


def same_tokens(model: Path, stages: int, request: Request) -> None:
    expected, reason = expected_text(model, tuple(request.prompt), request.max_new_tokens, request.sampling,
                                     request.stop_ids)
    result = cluster(model, stages).generate(request)
    first = next((i for i, (a, b) in enumerate(zip(result.tokens, expected, strict=False)) if a != b), None)
    assert result.tokens == expected, f"{request.strategy}, {stages} stages: token {first} differs"
    assert result.finish_reason == reason


@pytest.mark.parametrize(("name", "stages", "variant", "kind"), TINY)
def test_tiny_model(eight_layers: Path, name: str, stages: int, variant: int, kind: str) -> None:
    """A random model: nearly every draft is wrong, so rounds, prunes and restarts abound."""
    prompt = np.random.default_rng(variant).integers(1, 97, 5 + 40 * variant).tolist()
    params = Params(segment=(1, 3, 16)[variant], width=4, tree_size=20, depth=3, prefill_chunk=16,
                    pipedec_width=(1, 5, 32)[variant], pipeinfer_split=(0.8, 0.1, 0.01)[variant],
                    pipeinfer_canonical=("all", "needed", "all")[variant], pearl_gamma=(0, 1, 4)[variant],
                    spd_width=(1, 2, 4)[variant], stpp_branching=("1", "2,2", "1,3,1")[variant])
    same_tokens(eight_layers, stages, Request(prompt, name, 10, SAMPLINGS[kind], params))


@pytest.mark.parametrize(("place", "name"), [*enumerate(STRATEGIES)])
def test_held_out_prompts(demo_model: Path, place: int, name: str) -> None:
    """Drafts that come true, sampled (the greedy texts are below).  `make soak` runs them all."""
    stages, sampling = (2, 4, 6, 8)[place % 4], list(SAMPLINGS.values())[1 + place % 2]
    same_tokens(demo_model, stages, Request(prompts(demo_model)[place % 5], name, 12, sampling))


@pytest.mark.soak
@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_fifty_prompts_everywhere(demo_model: Path, name: str, stages: int, kind: str) -> None:
    for prompt in prompts(demo_model):
        same_tokens(demo_model, stages, Request(prompt, name, 16, SAMPLINGS[kind]))


@pytest.mark.parametrize("rank", ["draft", "noise"])
def test_either_ranking_gives_the_same_text(demo_model: Path, rank: str) -> None:
    request = Request(prompts(demo_model)[0], "flowspec", 12, Sampling(1.0, seed=3), Params(rank=rank))  # type: ignore[arg-type]
    same_tokens(demo_model, 4, request)


@cache
def generated(model_dir: Path) -> tuple[int, list[int]]:
    """The end-of-sequence id, and what transformers' own generate makes of the first prompt."""
    model = AutoModelForCausalLM.from_pretrained(model_dir / "target", dtype=torch.float32)
    prompt = prompts(model_dir)[0]
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
    return int(model.generation_config.eos_token_id), out[0, len(prompt):].tolist()


@pytest.mark.parametrize("name", STRATEGIES)
def test_greedy_text_is_that_of_generate(demo_model: Path, name: str) -> None:
    end, expected = generated(demo_model)
    result = cluster(demo_model, 4).generate(
        Request(prompts(demo_model)[0], name, 16, stop_ids=frozenset({end})))
    ended = [end] if result.finish_reason == "stop" else []
    assert result.tokens + ended == expected


@pytest.mark.parametrize(("name", "limit"), [*zip(STRATEGIES, cycle((1, 2, 7)), strict=False)])
def test_limits_are_exact(tiny_model: Path, name: str, limit: int) -> None:
    same_tokens(tiny_model, 2, Request([5, 6, 7], name, limit))


@pytest.mark.parametrize("name", strategies())
def test_the_text_ends_before_the_end_of_sequence(demo_model: Path, name: str) -> None:
    """Any token can be named the end; the one that plain decoding meets seventh is."""
    prompt = prompts(demo_model)[1]
    tokens, _ = expected_text(demo_model, tuple(prompt), 12, Sampling(), frozenset())
    stop = frozenset({tokens[6]})
    assert expected_text(demo_model, tuple(prompt), 12, Sampling(), stop) == (
        tokens[: tokens.index(tokens[6])], "stop")
    same_tokens(demo_model, 3, Request(prompt, name, 12, stop_ids=stop))


def three_tokens(model: Path, name: str, seed: int) -> tuple[int, ...]:
    """A sampled text; its second and third token may come from the tree."""
    sampling = Sampling(1.0, seed=seed)
    if name == "plain":
        return tuple(expected_text(model, (3, 1, 4), 3, sampling, frozenset())[0])
    return tuple(cluster(model, 2).generate(
        Request([3, 1, 4], name, 3, sampling, Params(width=3, tree_size=8, depth=2))).tokens)


@pytest.mark.parametrize("name", [
    "plain", *(pytest.param(name, marks=pytest.mark.soak) for name in ("autoregressive", *THOROUGH))])
def test_sampled_texts_follow_the_target(small_vocabulary_model: Path, name: str) -> None:
    """Chi-square over texts of three tokens against probabilities worked out with transformers."""
    model = AutoModelForCausalLM.from_pretrained(small_vocabulary_model / "target", dtype=torch.float64)
    prompt, s = [3, 1, 4], Sampling(1.0)

    @lru_cache
    def p(*text: int) -> np.ndarray:
        with torch.inference_mode():
            return np.exp(log_probs(model(torch.tensor([[*prompt, *text]])).logits[0, -1:].numpy(), s))[0]

    expected = {(a, b, c): p()[a] * p(a)[b] * p(a, b)[c]
                for a in range(8) for b in range(8) for c in range(8)}
    draws = 300
    counts = Counter(three_tokens(small_vocabulary_model, name, seed) for seed in range(draws))
    # Rare texts are counted together, so that every cell expects at least five.
    rare = {text for text, share in expected.items() if draws * share < 5}
    cells = [(counts[text], draws * share) for text, share in expected.items() if text not in rare]
    cells.append((sum(counts[t] for t in rare), sum(draws * expected[t] for t in rare) or 1e-9))
    statistic = sum((seen - e) ** 2 / e for seen, e in cells)
    freedom = len(cells) - 1
    assert freedom >= 2
    # Wilson and Hilferty's approximation of the upper 1e-6 point (z = 4.753).
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.753 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("name", THOROUGH)
def test_sampled_texts_are_those_of_one_token_a_pass(small_vocabulary_model: Path, name: str) -> None:
    """Seed for seed, so their distribution is the one that the chi-square test finds right.

    40 seeds miss a fault that alters one text in ten with probability 0.015; the chi-square test of
    300 draws would need one that alters many more.
    """
    texts = [[three_tokens(small_vocabulary_model, strategy, seed) for seed in range(40)]
             for strategy in (name, "plain")]
    assert texts[0] == texts[1]
    assert len(set(texts[1])) > 20
