"""Texts in 16 bits: near ties against wrong tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.requests import answer

from flowspec_edge.d0.request import OnTokens, Request, Result
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.lab.bench.exactness import mark_of
from flowspec_edge.lab.bench.near_ties import TOLERANCE, NearTies, _nearly_best
from flowspec_edge.lab.bench.results import BenchReport
from flowspec_edge.lab.bench.runner import BenchPlan, Workload, measure
from flowspec_edge.lab.bench.tables import table
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling, choose
from flowspec_edge.strategies.params import Params

PROMPT = [5, 9, 20, 7]
SAMPLINGS = [Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=20, top_p=0.8, seed=4),
             Sampling(1.3, top_p=0.5, seed=5)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_text_is_explained_and_an_altered_one_is_not(model: Path, sampling: Sampling) -> None:
    decoder = PlainDecoder(model, "bf16")
    tokens, reason = decoder.generate(PROMPT, 16, sampling)
    explain = NearTies(decoder.model).explain
    request = Request(PROMPT, max_new_tokens=16, sampling=sampling)
    assert explain(request, tokens, reason)
    assert not explain(request, tokens[:-1], "length")
    assert not explain(request, [*tokens, 1], "length")
    assert not explain(request, tokens[:-1], "stop")  # there is nothing to stop at
    wrong = 0
    for at in range(16):
        altered = [*tokens[:at], (tokens[at] + 1) % 300, *tokens[at + 1 :]]
        wrong += not explain(request, altered, reason)
    assert wrong >= 15  # one of them may be a near tie


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_end_counts_as_a_token(model: Path, sampling: Sampling) -> None:
    decoder = PlainDecoder(model, "bf16")
    stop = decoder.generate(PROMPT, 8, sampling)[0][-1]
    request = Request(PROMPT, max_new_tokens=8, sampling=sampling, stop_ids=frozenset({stop}))
    tokens, reason = decoder.generate(PROMPT, 8, sampling, request.stop_ids)
    explain = NearTies(decoder.model).explain
    assert reason == "stop"
    assert explain(request, tokens, reason)
    assert not explain(replace(request, stop_ids=frozenset({(stop + 1) % 300})), tokens, reason)
    assert not explain(request, [*tokens, stop], "length")


@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling(1.0, top_k=3, seed=6)])
def test_the_choice_of_perturbed_logits_is_nearly_best(sampling: Sampling) -> None:
    """Whatever a change of every logit by less than half the slack makes of the choice; and it does make
    something of it."""
    rng, changed = np.random.default_rng(0), 0
    for position in range(800):
        logits = rng.normal(size=60) * rng.choice([0.5, 3.0])  # flat, or with most of the mass on a few
        slack = 0.2
        moved = logits + 0.499 * slack * rng.choice([-1, 1], 60)
        token = int(choose(moved[None], np.array([position]), sampling)[0])
        changed += token != int(choose(logits[None], np.array([position]), sampling)[0])
        assert _nearly_best(logits, position, [token], Request([], sampling=sampling), slack)
    assert changed > 10


def test_a_token_that_is_far_behind_is_not_nearly_best() -> None:
    logits = np.array([1.0, 0.99, 0.5, -9.0])
    assert _nearly_best(logits, 0, [1], Request([]), 0.02)
    assert not _nearly_best(logits, 0, [2], Request([]), 0.02)
    top_2 = Request([], sampling=Sampling(1.0, top_k=2))
    assert not any(_nearly_best(logits, position, [token], top_2, 0.02)  # cut off, however the noise falls
                   for position in range(200) for token in (2, 3))


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 2.5])
def test_the_slack_is_of_logits_at_every_temperature(temperature: float) -> None:
    """Where nothing is cut off: what is chosen once its logit is raised by the slack, and nothing else."""
    rng, sampling = np.random.default_rng(1), Sampling(temperature, seed=6)
    verdicts = set()
    for position in range(200):
        logits, token = rng.normal(size=6), int(rng.integers(6))
        raised = logits + 0.7 * (np.arange(6) == token)
        chosen = int(choose(raised[None], np.array([position]), sampling)[0]) == token
        assert _nearly_best(logits, position, [token], Request([], sampling=sampling), 0.7) == chosen
        verdicts.add(chosen)
    assert verdicts == {True, False}


class Swapping:
    """A cluster that gives the second likeliest token wherever that is within ``TOLERANCE``, or wherever
    it is not."""

    clock = "virtual"

    def __init__(self, cluster: VirtualCluster, decoder: PlainDecoder, near: bool) -> None:
        self.cluster, self.decoder, self.near = cluster, decoder, near
        self.written: list[list[int]] = []

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Result:
        result, tokens = self.cluster.generate(request, on_tokens), list[int]()
        model = self.decoder.model
        for _ in result.tokens:
            with torch.inference_mode():
                rows = model(torch.tensor([[*request.prompt, *tokens]]), use_cache=False).logits[0].float()
            best, second = rows[-1].topk(2).indices.tolist()
            near = bool(rows[-1, best] - rows[-1, second] < TOLERANCE * rows.std())
            tokens.append(second if near == self.near and not (tokens and not near) else best)
        self.written.append(tokens)
        return replace(result, tokens=tokens)

    def close(self) -> None:
        self.cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("near", [True, False])
def test_a_bench_counts_near_ties_and_refuses_others(model: Path, near: bool) -> None:
    """In bf16; the prompts are those of thirty at whose first token there is a near tie."""
    decoder = PlainDecoder(model, "bf16")
    cluster = VirtualCluster(model, 2, load_profile("paper-7b"), "bf16")
    swapping = Swapping(cluster, decoder, near)
    requests = [Request([i, i + 1, 7], max_new_tokens=4) for i in range(30)]

    plain = partial(answer, decoder)
    report = BenchReport(None, "virtual")
    plan = BenchPlan(["autoregressive"], [Workload("t", requests)], [0.0])
    measure(swapping, plain, plan, report, explains=NearTies(decoder.model).explain)
    [row] = report.rows
    if near:
        expected = [plain(request)[0] for request in requests]
        wrong = [sum(a != b for a, b in zip(tokens, right, strict=True))
                 for tokens, right in zip(swapping.written, expected, strict=True)]
        assert (row.identical, row.different_tokens) == (False, sum(wrong))
        assert row.different_answers == row.near_ties == sum(map(bool, wrong)) > 0
        assert report.differences == []
        answers, tokens = (next(iter(column.cells)) for column in table([row], "").columns[-2:])
        assert (answers, tokens) == (f"{row.near_ties}/30 ≈", f"{sum(wrong)}/{row.tokens}")
    else:
        assert not row.identical
        assert len(report.differences) == row.different_answers - row.near_ties > 0
    strict = BenchReport(None, "virtual")
    measure(swapping, plain, plan, strict)  # fp32's rule: to the token
    assert not strict.rows[0].identical
    assert strict.differences


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_texts_are_the_unsharded_models_beside_other_requests(model: Path, dtype: str) -> None:
    """Token for token, as transformers' layers give them with sums in the order of the path; four greedy and four
    sampled texts, whose rows go through the stages together."""
    decoder, rng = PlainDecoder(model, dtype), np.random.default_rng(2)
    requests = [Request(rng.integers(0, 300, size=4 + i).tolist(), strategy, 24,
                        sampling=Sampling(float(i % 2), seed=i), params=Params(draft="ngram"))
                for i, strategy in enumerate(["flowspec_plus", "flowspec", "pipedec", "autoregressive"] * 2)]
    results = VirtualCluster(model, 2, load_profile("paper-7b"), dtype).generate_many(requests)
    for request, result in zip(requests, results, strict=True):
        expected, _ = decoder.generate(list(request.prompt), 24, request.sampling)
        assert list(result.tokens) == expected, request.strategy


@pytest.mark.parametrize(("different", "near", "mark"), [
    (0, 0, ""), (None, None, ""), (3, 3, "≈"), (3, 2, "≠"), (1, 0, "≠")])
def test_a_mark_says_whether_near_ties_explain(different: int | None, near: int | None, mark: str) -> None:
    assert mark_of(different, near) == mark
