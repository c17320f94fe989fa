"""The estimate against torch's autograd, and against streams whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.hypothesis_examples import examples

from flowspec_edge.tree.acceptance import (
    _GREEDY,
    _SAMPLED,
    AcceptanceEstimator,
    AcceptanceWeights,
    Evidence,
)

NO = -math.inf
log_p = st.floats(-7.5, -0.001)
CASES = {"both": (True, True, True), "draft": (True, False, True),
         "lookup": (False, True, False), "unnamed": (False, True, True)}


def log_odds(log_p: float) -> torch.Tensor:
    """As torch has it, within the bounds that the module sets."""
    return torch.logit(torch.tensor(log_p, dtype=torch.float64).exp()).clamp(-8, 8)


@pytest.mark.parametrize("case", CASES)
@given(drafted=log_p, looked_up=log_p, greedy=st.booleans(), outcomes=st.lists(st.booleans(), min_size=1,
                                                                              max_size=5))
@examples(60, quick=24)
def test_a_step_is_one_of_gradient_descent_on_the_log_loss(
    case: str, drafted: float, looked_up: float, greedy: bool, outcomes: list[bool]
) -> None:
    named, found, asked = CASES[case]
    evidence = Evidence(drafted if named else NO, looked_up if found else NO, asked)
    acceptance = AcceptanceEstimator(greedy)
    weights = torch.tensor((_GREEDY if greedy else _SAMPLED)[case],  # type: ignore[index]
                           dtype=torch.float64, requires_grad=True)
    zero = torch.zeros((), dtype=torch.float64)
    inputs = torch.stack([zero + 1, log_odds(drafted) if named else zero,
                          log_odds(looked_up) if found else zero])
    descent = torch.optim.SGD([weights], lr=0.05 if greedy else 0.01)
    for taken in outcomes:
        x = weights @ inputs
        assert acceptance.probability(evidence) == pytest.approx(torch.sigmoid(x).item(), rel=1e-9)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(x, zero + float(taken))
        descent.zero_grad()
        loss.backward()
        descent.step()
        acceptance.learn(evidence, taken)
    assert acceptance.probability(evidence) == pytest.approx(torch.sigmoid(weights @ inputs).item(), rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_what_is_learned_of_one_case_leaves_the_others(case: str) -> None:
    evidence = {name: Evidence(-0.7 if named else NO, -0.9 if found else NO, asked)
                for name, (named, found, asked) in CASES.items()}
    before, after = AcceptanceEstimator(True), AcceptanceEstimator(True)
    after.learn(evidence[case], True)
    changed = [name for name, known in evidence.items()
               if after.probability(known) != before.probability(known)]
    assert changed == [case]


extreme = st.one_of(st.sampled_from([NO, 0.0, -1e-300, -1e-17, -5e-324, -1e300]), st.floats(-50, 0))


@given(drafted=extreme, looked_up=extreme, asked=st.booleans(), greedy=st.booleans(),
       outcomes=st.lists(st.booleans(), max_size=4), times=st.integers(1, 200))
@settings(deadline=None)
def test_a_probability_whatever_the_scores(drafted: float, looked_up: float, asked: bool, greedy: bool,
                                           outcomes: list[bool], times: int) -> None:
    acceptance, evidence = AcceptanceEstimator(greedy), Evidence(drafted, looked_up, asked)
    for taken in outcomes * times:
        acceptance.learn(evidence, taken)
    assert 0 < acceptance.probability(evidence) < 1


@pytest.mark.parametrize("greedy", [True, False])
def test_with_learning_off_nothing_changes(greedy: bool) -> None:
    acceptance = AcceptanceEstimator(greedy, learns=False)
    evidence = [Evidence(-0.7 if named else NO, -0.9 if found else NO, asked)
                for named, found, asked in CASES.values()]
    before = [acceptance.probability(known) for known in evidence]
    for known in evidence * 20:
        acceptance.learn(known, True)
    assert [acceptance.probability(known) for known in evidence] == before
    assert before == [AcceptanceEstimator(greedy).probability(known) for known in evidence]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_source_right_half_as_often_is_believed_half(case: str, greedy: bool) -> None:
    """Claims of .2, .5 and .8, of which .1, .25 and .4 come true; the estimates before and after."""
    named, found, asked = CASES[case]
    rng = np.random.default_rng(5)
    claims = np.array([0.2, 0.5, 0.8])

    def seen(claim: float) -> Evidence:
        return Evidence(math.log(claim) if named else NO, math.log(claim) if found else NO, asked)

    def found_out() -> list[float]:
        return [acceptance.probability(seen(claim)) for claim in claims]

    acceptance = AcceptanceEstimator(greedy)
    first = np.abs(found_out() - claims / 2).max()
    means = []
    for step, claim in enumerate(rng.choice(claims, 20_000)):
        acceptance.learn(seen(claim), bool(rng.random() < claim / 2))
        if step >= 15_000:
            means.append(found_out())
    late = np.mean(means, axis=0)
    np.testing.assert_allclose(late, claims / 2, atol=0.06)
    assert np.abs(late - claims / 2).max() < max(first, 0.06)


@given(st.lists(st.tuples(st.booleans(), log_p, st.booleans())))
@examples(60, quick=24)
def test_requests_that_share_weights_learn_as_one_does(stream: list[tuple[bool, float, bool]]) -> None:
    """Whatever request meets the evidence; and texts with and without noise do not touch each other's weights."""
    shared, one = AcceptanceWeights(), AcceptanceEstimator(True)
    requests = [AcceptanceEstimator(True, weights=shared) for _ in range(2)]
    sampled, deaf = AcceptanceEstimator(False, weights=shared), AcceptanceEstimator(True, False, shared)
    for second, drafted, taken in stream:
        evidence = Evidence(drafted, NO, True)
        requests[second].learn(evidence, taken)
        one.learn(evidence, taken)
        for request in (*requests, AcceptanceEstimator(True, weights=shared)):
            assert request.probability(evidence) == one.probability(evidence)
        assert sampled.probability(evidence) == AcceptanceEstimator(False).probability(evidence)
        assert deaf.probability(evidence) == AcceptanceEstimator(True, False).probability(evidence)
