"""Repetition penalty, min-p, bad words, allowed tokens, least lengths and further ends: transformers'
``generate`` with its own logits processors says which tokens every strategy has to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.cases import strategies
from kits.transformers_generate import reference_text
from kits.virtual_clusters import cluster
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flowspec_edge.d0.request import Request
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling import rule
from flowspec_edge.sampling.restrictions import AnswerRestrictions
from flowspec_edge.sampling.sampler import AnswerPenalties, choose
from flowspec_edge.sampling.settings import Penalties, Restrictions, Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES

SMALL = Params(width=4, tree_size=20, depth=3)
PROMPT = tuple(range(8))
LIMIT = 24
SAMPLINGS = (Sampling(), Sampling(1.0, seed=11, min_p=0.3), Sampling(0.8, 5, 0.9, seed=12, min_p=0.2),
             Sampling(1.0, top_p=0.8, seed=13, min_p=0.1), Sampling(1.0, top_p=0.0, seed=14))
BAD_WORDS = ((2,), (3, 4), (5, 5), (7, 0, 1))
# What is asked for, and the same to transformers: penalties, restrictions, ends, processors.
CASES: tuple[tuple[Penalties | None, Restrictions | None, frozenset[int], Any], ...] = (
    (Penalties(repetition=1.3), None, frozenset(), lambda ends: [RepetitionPenaltyLogitsProcessor(1.3)]),
    (Penalties(repetition=0.7), None, frozenset({6}), lambda ends: [RepetitionPenaltyLogitsProcessor(0.7)]),
    (None, Restrictions(bad_words=BAD_WORDS), frozenset(),
     lambda ends: [NoBadWordsLogitsProcessor([*map(list, BAD_WORDS)], eos_token_id=None)]),
    (None, Restrictions(frozenset({1, 3, 4, 6})), frozenset({6}),
     lambda ends: [PrefixConstrainedLogitsProcessor(lambda batch, ids: [1, 3, 4, 6], 1)]),
    (None, Restrictions(min_tokens=9), frozenset({1, 2, 3}),
     lambda ends: [MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, sorted(ends))]),
    (Penalties(repetition=1.2), Restrictions(bad_words=((4,),), min_tokens=5), frozenset({1, 2, 3}),
     lambda ends: [RepetitionPenaltyLogitsProcessor(1.2), NoBadWordsLogitsProcessor([[4]], eos_token_id=None),
                   MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, sorted(ends))]),
    (None, None, frozenset({3}), lambda ends: []),
)


@cache
def reference(model: Path, sampling: Sampling, case: int) -> tuple[list[int], str]:
    _, _, ends, processors = CASES[case]
    steps: Sequence[LogitsProcessor] = processors(ends)
    return reference_text(model, PROMPT, sampling, LIMIT, steps, sorted(ends))


def request(name: str, sampling: Sampling, case: int) -> Request:
    penalties, restrictions, ends, _ = CASES[case]
    return Request(PROMPT, name, LIMIT, sampling, SMALL, ends, penalties=penalties,
                   restrictions=restrictions)


@pytest.mark.parametrize("name", strategies())
def test_every_strategy_gives_transformers_tokens(small_vocabulary_model: Path, name: str) -> None:
    """Of eight tokens: drafts are often right, so that rows deep in the tree count."""
    at, accepted = [*STRATEGIES].index(name), 0
    for case in range(len(CASES)) if name == "flowspec_plus" else {at % len(CASES), (at + 3) % len(CASES)}:
        sampling = SAMPLINGS[(at + case) % len(SAMPLINGS)]
        result = cluster(small_vocabulary_model, 2).generate(request(name, sampling, case))
        expected = reference(small_vocabulary_model, sampling, case)
        assert (result.tokens, result.finish_reason) == expected, (case, sampling)
        accepted += result.stats.accepted
    assert accepted > 0 or name != "flowspec_plus"


def test_each_case_changes_the_text(small_vocabulary_model: Path) -> None:
    for case, (_, _, ends, _) in enumerate(CASES[:-1]):
        texts = {sampling: reference_text(small_vocabulary_model, PROMPT, sampling, LIMIT, [], sorted(ends))
                 for sampling in SAMPLINGS}
        assert any(reference(small_vocabulary_model, sampling, case) != text
                   for sampling, text in texts.items()), case


def test_plain_decoding_is_the_same(small_vocabulary_model: Path) -> None:
    plain = PlainDecoder(small_vocabulary_model)
    for case, (penalties, restrictions, ends, _) in enumerate(CASES):
        sampling = SAMPLINGS[case % len(SAMPLINGS)]
        assert plain.generate(list(PROMPT), LIMIT, sampling, ends, penalties, restrictions) == \
               reference(small_vocabulary_model, sampling, case)


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_a_repetition_penalty_is_transformers_whatever_the_sign(factor: float) -> None:
    """For tokens of the prompt, the answer and a row's path."""
    logits, paths = torch.linspace(-3, 3, 9)[None].repeat(2, 1), ([], [6, 1])
    state = AnswerPenalties(Penalties(repetition=factor), [0, 8])
    state.extend([2])
    found = state.applied(logits, paths)
    for row, path in enumerate(paths):
        expected = RepetitionPenaltyLogitsProcessor(factor)(torch.tensor([[0, 8, 2, *path]]), logits[row : row + 1])
        torch.testing.assert_close(found[row], expected[0])


@given(data=st.data())
def test_min_p_is_transformers_whatever_else_filters(data: st.DataObject) -> None:
    """The kept tokens, and the drawn one, which a float32 kernel finds."""
    vocabulary = data.draw(st.integers(2, 40))
    seed = data.draw(st.integers(0, 1000))
    sampling = Sampling(data.draw(st.sampled_from([0.5, 1.0, 1.7])), data.draw(st.sampled_from([0, 3, 50])),
                        data.draw(st.sampled_from([1.0, 0.9, 0.3])), seed,
                        data.draw(st.sampled_from([0.01, 0.1, 0.5, 1.0])))
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (4, vocabulary))).float()
    steps: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    kept = logits.double()
    for step in [*steps, MinPLogitsWarper(sampling.min_p)]:
        kept = step(torch.zeros(4, 1, dtype=torch.long), kept)
    defined = rule.log_probs(logits.numpy(), sampling)
    np.testing.assert_array_equal(np.isfinite(defined), np.isfinite(kept.numpy()))
    np.testing.assert_allclose(defined, torch.log_softmax(kept, -1).numpy(), atol=1e-9)
    positions = np.arange(4)
    np.testing.assert_array_equal(choose(logits, positions, sampling),
                                  rule.choose(logits.numpy(), positions, sampling))


@given(data=st.data())
def test_the_restrictions_are_those_of_answer_and_path(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 4), max_size=6)
    words = data.draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=3))
    allowed = data.draw(st.none() | st.frozensets(st.integers(0, 4), min_size=1))
    least, ends = data.draw(st.integers(0, 6)), data.draw(st.frozensets(st.integers(0, 4)))
    prompt, answer = data.draw(tokens), list[int]()
    state = AnswerRestrictions(Restrictions(allowed, tuple(words), least), prompt, ends)
    for new in data.draw(st.lists(tokens, max_size=3)):
        state.extend(new)
        answer += new
    path = data.draw(tokens)
    text = [*prompt, *answer, *path]
    bits = np.unpackbits(state.allowed(path, 5), bitorder="little")[:5].astype(bool)
    for token in range(5):
        after = [*text, token]
        bad = any(after[-len(word):] == list(word) for word in words)
        short = token in ends and len(answer) + len(path) < least
        outside = allowed is not None and token not in allowed
        assert bits[token] == (not (bad or short or outside))


def test_an_end_that_the_vocabulary_lacks_restricts_nothing(small_vocabulary_model: Path) -> None:
    """A tokenizer may have more tokens than the model."""
    few, restrictions = frozenset({1}), Restrictions(min_tokens=9)
    more = few | {8, 50_000}
    asked = replace(request("flowspec", Sampling(), 4), stop_ids=few)
    expected = cluster(small_vocabulary_model, 2).generate(asked).tokens
    assert cluster(small_vocabulary_model, 2).generate(replace(asked, stop_ids=more)).tokens == expected
    plain = PlainDecoder(small_vocabulary_model)
    assert plain.generate(list(PROMPT), LIMIT, Sampling(), more, None, restrictions)[0] == expected


@pytest.mark.parametrize("name", ["flowspec_plus", "autoregressive", "pipedec"])
def test_no_token_left_is_an_error_of_the_request(small_vocabulary_model: Path, name: str) -> None:
    """At once, and after tokens: 1 may follow once, and then nothing may."""
    asked = replace(request(name, Sampling(), 2), penalties=None)
    for restrictions in (Restrictions(frozenset({1}), ((1,),)), Restrictions(frozenset({1}), ((1, 1, 1),))):
        with pytest.raises(UsageError, match="no token may come next"):
            cluster(small_vocabulary_model, 2).generate(replace(asked, restrictions=restrictions))


@pytest.mark.parametrize(("wrong", "says"), [
    (lambda: Sampling(min_p=1.5), "min-p"), (lambda: Sampling(min_p=float("nan")), "min-p"),
    (lambda: Penalties(repetition=0.0), "repetition"),
    (lambda: Penalties(repetition=float("nan")), "repetition"),
    (lambda: Restrictions(frozenset()), "allowed tokens"),
    (lambda: Restrictions(bad_words=((),)), "bad word"),
    (lambda: Restrictions(min_tokens=-1), "least number")])
def test_values_out_of_range_are_refused(wrong: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        wrong()


@pytest.mark.parametrize("token", [-1, 8])
def test_a_token_outside_the_vocabulary_is_refused(small_vocabulary_model: Path, token: int) -> None:
    for restrictions in (Restrictions(frozenset({token})), Restrictions(bad_words=((1, token),))):
        with pytest.raises(UsageError, match="outside the vocabulary of 8"):
            cluster(small_vocabulary_model, 2).generate(
                Request([1], max_new_tokens=2, restrictions=restrictions))
