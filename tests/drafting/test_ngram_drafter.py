"""A session of look-ups against brute force over the whole text, and scores against their definition."""

from __future__ import annotations

import numpy as np
import pytest
from kits.text_lookup import brute_force

from flowspec_edge.drafting.ngram import NgramDrafter
from flowspec_edge.errors import ProtocolError
from flowspec_edge.sampling.rule import Sampling, gumbel
from flowspec_edge.tree.draft_api import DraftNode, DraftOutput, DraftRequest

V = 50


@pytest.mark.parametrize("seed", range(4))
def test_random_walks_agree_with_brute_force(seed: int) -> None:
    """A session: the tree grows below looked-up and other nodes, the text goes on along it or not."""
    rng = np.random.default_rng(seed)
    drafter = NgramDrafter(3, 1)
    drafter.reset(Sampling(), "noise", 0.6)
    text: list[int] = []

    def commit(tokens: list[int]) -> None:
        drafter.commit(tokens, None)
        text.extend(tokens)

    commit([0])
    commit(rng.integers(0, 4, 8).tolist())
    next_id, root, tree = 1, 0, {}  # tree: id -> (node, path below the root)
    expanded: set[int] = set()
    seen = 0
    for _ in range(60):
        top = DraftNode(root, -1, text[-1], len(text) - 1)
        known = [i for i, (node, _) in tree.items() if node.parent in expanded | {root}]
        picked = rng.choice(known, min(4, len(known)), replace=False).tolist() if known else []
        picked = [i for i in picked if tree[i][0].parent not in picked]
        nodes = [(top, [])] + [tree[i] for i in picked]
        got = drafter.expand(DraftRequest(root, tuple(node for node, _ in nodes), 3))
        assert got.tokens.shape == got.scores.shape == (len(nodes), 3)
        for (node, path), tokens, scores in zip(nodes, got.tokens.tolist(), got.scores, strict=True):
            expected = brute_force(text, text + path, 3, 1)
            there = int(np.isfinite(scores).sum())
            seen += there
            assert there == min(3, len(expected))
            assert (scores[there:] == -np.inf).all()
            best = sorted(expected.values(), reverse=True)[:there]
            np.testing.assert_allclose(np.exp(scores[:there]), best)
            assert [expected[t] for t in tokens[:there]] == pytest.approx(best)
            expanded.add(node.id)
            there_already = {other.token for other, _ in tree.values() if other.parent == node.id}
            for token in {*tokens[:there], int(rng.integers(0, 4))} - there_already:
                tree[next_id] = (DraftNode(next_id, node.id, token, node.position + 1), [*path, token])
                next_id += 1
        again = drafter.expand(DraftRequest(root, tuple(node for node, _ in nodes), 3))
        assert again.tokens.tolist() == got.tokens.tolist()  # asking twice changes nothing
        if rng.random() < 0.6:  # the text follows the tree
            root = int(rng.choice(list(tree)))
            followed = tree[root][1]
            commit(followed)
            tree = {i: (node, path[len(followed):]) for i, (node, path) in tree.items()
                    if path[: len(followed)] == followed and len(path) > len(followed)}
        elif rng.random() < 0.5:  # a miss
            commit(rng.integers(0, 4, 1).tolist())
            root, tree, next_id = next_id, {}, next_id + 1
    assert seen > 100


def expand(drafter: NgramDrafter, text: list[int]) -> DraftOutput:
    drafter.commit(text, None)
    return drafter.expand(DraftRequest(0, (DraftNode(0, -1, text[-1], len(text) - 1),), 2))


def test_with_noise_a_score_is_the_chance_to_win() -> None:
    """Drawn anew many times: the token's own noise is known, the best of all others is not."""
    text = [5, 6, 7, 1, 5, 6, 8, 1, 5, 6]
    p = 1 / 6  # of 7 and of 8: 1 / (2 + 2^2)
    rng = np.random.default_rng(0)
    for seed in range(3):
        sampling = Sampling(1.0, seed=seed)
        drafter = NgramDrafter(2, 2)
        drafter.reset(sampling, "noise", 0.6)
        got = expand(drafter, text)
        assert {*got.tokens[0].tolist()} == {7, 8}
        own = gumbel(seed, len(text), V)
        for token, score in zip(got.tokens[0].tolist(), got.scores[0].tolist(), strict=True):
            others = np.log((1 - p) / 29) + rng.gumbel(size=(10_000, 29))
            wins = (others.max(axis=1) < np.log(p) + own[token]).mean()
            assert np.exp(score) == pytest.approx(wins, abs=0.02)
        assert got.scores[0, 0] >= got.scores[0, 1]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)])
def test_without_noise_a_score_is_the_estimate(sampling: Sampling) -> None:
    drafter = NgramDrafter(4, 2)
    drafter.reset(sampling, "draft", 0.6)
    assert expand(drafter, [5, 6, 7, 1, 5, 6]).scores[0].tolist() == [np.log(0.5), -np.inf]


def test_a_new_session_knows_nothing_of_the_old_one() -> None:
    drafter = NgramDrafter(4, 1)
    assert np.isfinite(expand(drafter, [1, 2, 1, 2]).scores).any()
    drafter.reset(Sampling(), "noise", 0.6)
    assert not np.isfinite(expand(drafter, [1, 2, 3, 1]).scores[0, 1:]).any()


def test_a_rewound_drafter_is_one_that_has_seen_no_more() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    drafter, fresh = (NgramDrafter(3, 1) for _ in range(2))
    expand(drafter, text)
    assert drafter.rewind(5, Sampling(1.0, seed=3), "noise", 1.0)
    assert not drafter.rewind(6, Sampling(), "draft", 1.0)
    fresh.reset(Sampling(1.0, seed=3), "noise", 1.0)
    fresh.commit(text[:5], None)
    request = DraftRequest(0, (DraftNode(0, -1, text[4], 4),), 3)
    got, expected = drafter.expand(request), fresh.expand(request)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert got.scores.tolist() == expected.scores.tolist()


def test_what_the_protocol_forbids_is_refused() -> None:
    drafter = NgramDrafter(4, 2)
    drafter.commit([1, 2, 3], None)
    with pytest.raises(ProtocolError, match="position 3, but the drafter was given a text of 3 tokens"):
        drafter.expand(DraftRequest(0, (DraftNode(0, -1, 3, 3),), 1))
    with pytest.raises(ProtocolError, match="node 5 was asked for before its parent 4"):
        drafter.expand(DraftRequest(0, (DraftNode(5, 4, 3, 4),), 1))
