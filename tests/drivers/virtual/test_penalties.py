"""Penalties and biases: transformers' logits under OpenAI's published formula say which tokens every strategy
has to give.

    mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence        (and + logit_bias[j])

mu are the logits and c[j] says how often token j was sampled before the position.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.cases import strategies
from kits.transformers_generate import reference_text
from kits.virtual_clusters import cluster
from numpy.typing import NDArray
from transformers import LogitsProcessor

from flowspec_edge.d0.request import Request
from flowspec_edge.errors import UsageError
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.sampler import AnswerPenalties
from flowspec_edge.sampling.settings import Penalties, Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES

SAMPLINGS = (Sampling(), Sampling(1.0, seed=11), Sampling(0.8, 40, 0.9, seed=12))
PENALTIES = (Penalties(0.6, 0.4, {5: 1.0, 3: -100.0}), Penalties(presence=1.0), Penalties(0.9),
             Penalties(logit_bias={2: 0.7, 6: -0.5}))
SMALL = Params(width=4, tree_size=20, depth=3)
LIMIT = 24


def published(logits: NDArray[np.float64], answer: list[int], wanted: Penalties) -> NDArray[np.float64]:
    """OpenAI's formula, for one position."""
    counts = np.bincount(np.array(answer, dtype=np.int64), minlength=len(logits)).astype(float)
    changed = logits - counts * wanted.frequency - (counts > 0).astype(float) * wanted.presence
    for token, bias in wanted.logit_bias.items():
        changed[token] += bias
    return changed


class Penalised(LogitsProcessor):
    def __init__(self, wanted: Penalties, prompt: int) -> None:
        self.wanted, self.prompt = wanted, prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        row = published(scores[0].double().numpy(), ids[0, self.prompt:].tolist(), self.wanted)
        return torch.from_numpy(row)[None]


def check(model: Path, stages: int, prompt: tuple[int, ...], name: str, sampling: Sampling, wanted: Penalties
          ) -> tuple[int, bool]:
    """Return how many draft tokens were accepted, and whether the text is another without penalties."""
    request = Request(prompt, name, LIMIT, sampling, SMALL, OpenModel(model).stop_ids, penalties=wanted)
    result = cluster(model, stages).generate(request)
    steps = [Penalised(wanted, len(prompt))]
    assert (result.tokens, result.finish_reason) == reference_text(model, prompt, sampling, LIMIT, steps)
    return result.stats.accepted, result.tokens != reference_text(model, prompt, sampling, LIMIT, [])[0]


@pytest.mark.parametrize("name", strategies())
def test_every_strategy_gives_the_published_tokens(small_vocabulary_model: Path, name: str) -> None:
    """Of eight tokens: drafts are often right, and repeat tokens of their own path."""
    at = [*STRATEGIES].index(name)
    every = list(enumerate(PENALTIES))
    runs = [check(small_vocabulary_model, 2, tuple(range(8)), name, SAMPLINGS[(at + i) % 3], wanted)
            for i, wanted in (every if name == "flowspec_plus" else (every[0], every[1 + at % 3]))]
    if name == "flowspec_plus":
        assert any(changed for _, changed in runs)
        assert sum(accepted for accepted, _ in runs) > 0


def test_drafts_of_a_trained_head_are_accepted(demo_model: Path) -> None:
    prompt = tuple(Tokenizer(OpenModel(demo_model)).encode("x = [1, 2, 3, 4, 5, 6,"))
    accepted, changed = check(demo_model, 3, prompt, "flowspec_plus", Sampling(), Penalties(0.5))
    assert changed
    assert accepted > LIMIT / 2


@given(data=st.data())
def test_the_counts_are_those_of_answer_and_path(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 8), max_size=12)
    bias = data.draw(st.dictionaries(st.integers(0, 8), st.floats(-100, 100)))
    wanted = Penalties(data.draw(st.floats(-2, 2)), data.draw(st.floats(-2, 2)), bias)
    state = AnswerPenalties(wanted)
    answer: list[int] = []
    for new in data.draw(st.lists(tokens, max_size=3)):
        state.extend(new)
        answer += new
        paths = data.draw(st.lists(tokens, min_size=1, max_size=4))
        logits = torch.tensor(data.draw(st.lists(st.floats(-30, 30, width=32), min_size=9, max_size=9)))
        found = state.applied(logits.repeat(len(paths), 1), paths).numpy()
        expected = [published(logits.double().numpy(), answer + path, wanted) for path in paths]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("wrong", [{"frequency": 2.1}, {"presence": -2.5}, {"frequency": float("nan")},
                                   {"logit_bias": {3: 101.0}}, {"logit_bias": {3: float("nan")}}])
def test_values_beyond_openais_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong)).split("_")[-1]):
        Penalties(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 8])
def test_a_bias_outside_the_vocabulary_is_refused(small_vocabulary_model: Path, token: int) -> None:
    wanted = Penalties(logit_bias={token: 1.0})
    with pytest.raises(UsageError, match="logit_bias"):
        cluster(small_vocabulary_model, 2).generate(Request([1], max_new_tokens=2, penalties=wanted))
