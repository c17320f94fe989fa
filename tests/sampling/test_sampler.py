"""The sampler on each device that is here against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.torch_devices import DEVICES

import flowspec_edge.sampling.sampler
from flowspec_edge.sampling import rule as definition
from flowspec_edge.sampling.rule import DraftVocabulary, Rank, Sampling, gumbel
from flowspec_edge.sampling.sampler import choose, log_probs, rank_children

SAMPLINGS = st.builds(
    Sampling, st.sampled_from([0.001, 0.3, 0.7, 1.0, 2.0, 50.0]), st.sampled_from([0, 1, 20, 300]),
    st.sampled_from([1.0, 0.9, 0.5, 0.1]), st.integers(0, 2**63 - 1))
# One token, fewer than a block, blocks with and without a rest, and so long that rows are worked on alone.
VOCABULARIES = st.sampled_from([1, 2, 5, 63, 64, 65, 300, 1024, 4099, 140_001])


def logits_of(seed: int, n: int, vocabulary: int, spread: float, coarse: bool) -> torch.Tensor:
    """``coarse``: as bfloat16 leaves them, so that many are equal."""
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, spread, (n, vocabulary))).float()
    return logits.bfloat16().float() if coarse else logits


@pytest.mark.parametrize("device", DEVICES)
@given(st.integers(0, 10_000), VOCABULARIES, st.sampled_from([0.0, 0.1, 1.0, 3.0, 30.0]), st.booleans(),
       st.one_of(SAMPLINGS, st.just(Sampling())), st.lists(st.integers(0, 2**40), min_size=1, max_size=4))
@example(seed=0, vocabulary=4099, spread=0.0, coarse=False, sampling=Sampling(), positions=[0])
@examples(120, quick=24)
def test_the_tokens_are_those_of_the_definition(
    device: str, seed: int, vocabulary: int, spread: float, coarse: bool, sampling: Sampling,
    positions: list[int],
) -> None:
    logits = logits_of(seed, len(positions), vocabulary, spread, coarse)
    drawn = choose(logits.to(device), np.array(positions), sampling)
    assert drawn.dtype == np.int32
    np.testing.assert_array_equal(drawn, definition.choose(logits.numpy(), np.array(positions), sampling))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [1, 61, 4099])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3), Sampling(0.7, 20, 0.9, seed=4),
                                      Sampling(1.0, 0, 0.5, seed=5)])
def test_tokens_whose_bit_is_not_set_are_as_unlikely_as_can_be(device: str, vocabulary: int,
                                                               sampling: Sampling) -> None:
    rng, positions = np.random.default_rng(vocabulary), np.arange(5)
    logits = logits_of(1, 5, vocabulary, 3.0, False)
    allowed = rng.random((5, vocabulary)) < 0.1
    allowed[:, -1] = True
    allowed[0] = True
    expected = definition.choose(np.where(allowed, logits.numpy(), -1e30), positions, sampling)
    bits = np.packbits(allowed, axis=1, bitorder="little")
    drawn = choose(logits.to(device), positions, sampling, bits)
    np.testing.assert_array_equal(drawn, expected)
    assert allowed[np.arange(5), drawn].all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [300, 4099])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_top_p_is_exact_at_every_tokens_edge(device: str, vocabulary: int, temperature: float) -> None:
    """As top_p falls, token after token is excluded that would be drawn: each with top_p just above and just
    below the mass ahead of it, nearer than float32 can tell."""
    for seed in range(12):
        logits, position = logits_of(seed, 1, vocabulary, 0.3 * 1.4**seed, False), np.array([seed])
        x = torch.log_softmax(logits[0].double() / temperature, -1).numpy()
        order = np.argsort(-x, kind="stable")
        ahead, scores = np.cumsum(np.exp(x[order])), (x + gumbel(seed, seed + 1, vocabulary))[order]
        place = int(scores.argmax())
        while place:
            for off in (0.0, 1e-12, 1e-7, 3e-5, 3e-3):
                for top_p in {ahead[place] * (1 - off), ahead[place] * (1 + off)}:
                    sampling = Sampling(temperature, 0, min(1.0, float(top_p)), seed)
                    np.testing.assert_array_equal(choose(logits.to(device), position, sampling),
                                                  definition.choose(logits.numpy(), position, sampling))
            place = int(scores[:place].argmax())


@pytest.mark.parametrize("device", DEVICES)
@given(st.integers(0, 10_000), st.sampled_from([2, 5, 40, 300]), st.integers(1, 6), st.integers(2, 40),
       st.integers(2, 80), st.sampled_from([0.5, 1.0, 3.0]))
@examples(200, quick=42)
def test_equal_logits_are_kept_in_the_order_of_their_ids(
    device: str, seed: int, vocabulary: int, levels: int, k: int, halves: int, temperature: float
) -> None:
    """A few levels of logits, and a top_p that often is the mass of some whole tokens, or half a one more."""
    logits = torch.from_numpy(np.random.default_rng(seed).integers(0, levels, (4, vocabulary))).float()
    logits[0] = torch.arange(vocabulary) < k  # as many as top-k keeps
    positions, sampling = np.arange(4), Sampling(temperature, k, min(1.0, halves / 2 / k), seed)
    np.testing.assert_array_equal(choose(logits.to(device), positions, sampling),
                                  definition.choose(logits.numpy(), positions, sampling))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e5])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.3, 1.0), (0.7, 0.999)])
def test_tokens_whose_scores_nearly_tie_are_told_apart(device: str, size: float, temperature: float,
                                                       top_p: float) -> None:
    """Of 200 rows: two tokens lead, and with their noise they are as equal as float32 logits allow."""
    rng, sampling, positions = np.random.default_rng(0), Sampling(temperature, 0, top_p, 3), np.arange(200)
    logits = np.full((200, 300), -1e6, np.float32)
    for position, row in zip(positions.tolist(), logits, strict=True):
        g = gumbel(sampling.seed, position + 1, 300)
        first, second = g.argmax(), g.argmin()  # a small logit is finer than a score
        row[second] = size + rng.uniform() + temperature * (g[first] - g[second])
        row[first] = float(row[second]) - temperature * (g[first] - g[second])
    np.testing.assert_array_equal(choose(torch.from_numpy(logits).to(device), positions, sampling),
                                  definition.choose(logits, positions, sampling))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sampling", [Sampling(1.0, seed=1), Sampling(0.7, top_p=0.9, seed=1),
                                      Sampling(1.0, top_k=20, top_p=0.8, seed=1)])
def test_16_bit_logits_are_drawn_from_and_ranked_as_their_values(
    device: str, dtype: torch.dtype, sampling: Sampling
) -> None:
    """A model in 16 bits gives such logits; the arithmetic on them is float32's."""
    logits, positions = logits_of(4, 40, 2000, 3.0, True).to(dtype), np.arange(40)
    exact = logits.double().numpy()
    np.testing.assert_array_equal(choose(logits.to(device), positions, sampling),
                                  definition.choose(exact, positions, sampling))
    tokens, scores = rank_children(logits.to(device), positions, 5, sampling, "noise", 0.6)
    expected, expected_scores = ranked(exact, positions, 5, sampling, "noise", 0.6)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=1), Sampling(1.0, top_p=0.9, seed=1),
                                      Sampling(0.7, top_k=20, top_p=0.8, seed=1)])
def test_rows_that_are_worked_on_in_several_parts(device: str, sampling: Sampling) -> None:
    """The last part has fewer rows than the others."""
    logits, positions = logits_of(2, 7, 60_000, 2.0, False), np.array([9, 3, 77, 4, 100, 2, 31])
    np.testing.assert_array_equal(choose(logits.to(device), positions, sampling),
                                  definition.choose(logits.numpy(), positions, sampling))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [255, 256, 257, 300, 319, 320])
def test_greedy_takes_the_first_of_the_largest_wherever_it_is(device: str, width: int) -> None:
    """Of blocks of 64 with and without a rest: alone, and with an equal one anywhere behind it."""
    places = np.array([(place, other) for place in range(width) for other in (place, (place + 67) % width)])
    logits = np.zeros((len(places), width), np.float32)
    for row, pair in zip(logits, places, strict=True):
        row[pair] = 1.0
    drawn = choose(torch.from_numpy(logits).to(device), np.zeros(len(places), np.int64), Sampling())
    np.testing.assert_array_equal(drawn, places.min(1))


@pytest.mark.parametrize("sampling", [Sampling(1.0, seed=1), Sampling(1.0, top_p=0.9, seed=1),
                                      Sampling(0.7, top_k=20, top_p=0.8, seed=1), Sampling()])
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_no_row_is_fetched_but_where_two_tokens_are_close(
    sampling: Sampling, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 400 rows: a row that the definition decides crosses to the CPU whole, so there must be few."""
    fetched = []

    def counted(logits: np.ndarray, positions: np.ndarray, sampling: Sampling) -> np.ndarray:
        fetched.append(len(logits))
        return original(logits, positions, sampling)

    original = definition.choose
    monkeypatch.setattr(flowspec_edge.sampling.sampler.definition, "choose", counted)
    choose(logits_of(5, 400, 8000, spread, False), np.arange(400), sampling)
    assert sum(fetched) <= 4


def test_nothing_is_drawn_for_no_rows() -> None:
    assert choose(torch.empty(0, 50), np.empty(0, np.int64), Sampling(1.0)).shape == (0,)


def ranked(logits: np.ndarray, positions: np.ndarray, k: int, sampling: Sampling, rank: Rank,
           tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Children by sorting everything, in float64: [n, k] ids and scores."""
    x = logits.astype(np.float64)
    if rank == "noise" and not sampling.greedy:
        noisy = [gumbel(sampling.seed, int(p) + 1, x.shape[-1]) for p in positions]
        x = (x / sampling.temperature + np.stack(noisy)) / tau
    x = torch.log_softmax(torch.from_numpy(x), -1).numpy()
    ids = np.argsort(-x, -1)[:, :k]
    return ids, np.take_along_axis(x, ids, -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", ["draft", "noise"])
@given(st.integers(0, 10_000), VOCABULARIES, st.sampled_from([0.5, 3.0, 20.0]), st.integers(1, 12),
       st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.3, 0.6, 1.0]))
@examples(40, quick=16)
def test_children_are_the_best_of_all(
    device: str, rank: Rank, seed: int, vocabulary: int, spread: float, k: int, temperature: float, tau: float
) -> None:
    logits, positions = logits_of(seed, 3, vocabulary, spread, False), np.array([4, 4, 77])
    sampling, k = Sampling(temperature, seed=seed), min(k, vocabulary)
    tokens, scores = rank_children(logits.to(device), positions, k, sampling, rank, tau)
    _, expected = ranked(logits.numpy(), positions, k, sampling, rank, tau)
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-4)
    # Each token has the score that it is given; of two that float32 cannot tell apart either comes first.
    every = ranked(logits.numpy(), positions, vocabulary, sampling, rank, tau)
    for row in range(3):
        own = dict(zip(every[0][row].tolist(), every[1][row].tolist(), strict=True))
        assert len(set(tokens[row].tolist())) == k
        np.testing.assert_allclose([own[t] for t in tokens[row].tolist()], scores[row], rtol=1e-5, atol=1e-4)
    assert tokens.dtype == np.int32
    assert (np.diff(scores, axis=1) <= 0).all()
    assert (scores <= 0).all()


@given(st.integers(0, 1000), st.floats(0.2, 2.0), st.floats(0.3, 1.0))
@examples(40, quick=16)
def test_noise_ranks_the_drawn_token_of_a_perfect_draft_first(
    seed: int, temperature: float, tau: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (4, 30))
    positions = np.array([3, 4, 90, 3])
    s = Sampling(temperature, seed=seed)
    tokens, _ = rank_children(torch.from_numpy(logits), positions, 5, s, "noise", tau)
    np.testing.assert_array_equal(tokens[:, 0], definition.choose(logits, positions, s))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", ["draft", "noise"])
def test_a_part_of_the_vocabulary_is_ranked_as_the_whole(rank: Rank, device: str) -> None:
    rng = np.random.default_rng(3)
    ids = rng.permutation(500)[:40]
    logits = rng.normal(0, 2, (6, 40))
    whole = np.full((6, 500), -np.inf)
    whole[:, ids] = logits
    positions, s = np.array([3, 4, 90, 3, 0, 7]), Sampling(0.7, seed=5)
    part = torch.from_numpy(logits).to(device)
    tokens, scores = rank_children(part, positions, 8, s, rank, 0.6, DraftVocabulary(ids, 500))
    expected, expected_scores = ranked(whole, positions, 8, s, rank, 0.6)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(scores, expected_scores, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_are_those_of_log_softmax(device: str) -> None:
    logits = logits_of(1, 3, 900, 2.0, False)
    own, top, values = log_probs(logits.to(device), np.array([0, 899, 17]), 4)
    expected = torch.log_softmax(logits.double(), -1)
    np.testing.assert_allclose(own, expected[[0, 1, 2], [0, 899, 17]].numpy(), atol=1e-9)
    np.testing.assert_array_equal(top, expected.topk(4).indices.numpy())
    np.testing.assert_allclose(values, expected.topk(4).values.numpy(), atol=1e-9)
