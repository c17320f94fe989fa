"""Looked-up children among a draft model's, against both asked alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.language_models import lm_drafter
from transformers import LlamaConfig, LlamaForCausalLM

from flowspec_edge.drafting.ngram import MergedDrafter, NgramDrafter, merge
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftOutput, DraftRequest

V = 40
Row = dict[int, float]
rows = st.dictionaries(st.integers(0, 9), st.floats(-9, 0), max_size=5)


def expansion(found: list[Row], columns: int) -> DraftOutput:
    """The rows best first, the rest absent."""
    made = DraftOutput.empty(len(found), columns)
    for i, row in enumerate(found):
        best = sorted(row.items(), key=lambda child: -child[1])
        for place, (token, score) in enumerate(best):
            made.tokens[i, place], made.scores[i, place] = token, score
    return made


@given(found=st.lists(st.tuples(rows, rows), min_size=1, max_size=4), children=st.integers(1, 8))
@examples(100, quick=18)
def test_the_best_of_both_stay(found: list[tuple[Row, Row]], children: int) -> None:
    merged = merge(expansion([a for a, _ in found], 5), expansion([b for _, b in found], 5), children)
    assert merged.tokens.shape == merged.scores.shape == (len(found), children)
    for (a, b), tokens, scores in zip(found, merged.tokens.tolist(), merged.scores.tolist(), strict=True):
        both = {token: max(a.get(token, -np.inf), b.get(token, -np.inf)) for token in a.keys() | b.keys()}
        there = min(children, len(both))
        assert scores[:there] == sorted(both.values(), reverse=True)[:there]
        assert [both[token] for token in tokens[:there]] == scores[:there]
        assert len(set(tokens[:there])) == there
        assert set(scores[there:]) <= {-np.inf}


def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=48,
                                        num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=5)])
def test_below_a_looked_up_node_the_model_drafts_on(sampling: Sampling, tmp_path: Path) -> None:
    """A session of both drafters apart and together: every node's children are the merged ones."""
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    own = lm_drafter(model(), tmp_path)
    apart = own, NgramDrafter(3, 2)
    together = MergedDrafter(own.clone_session(), NgramDrafter(3, 2))
    for drafter in (*apart, together):
        drafter.reset(sampling, "noise", 0.6)
        drafter.commit(text[:1], None)
        drafter.commit(text[1:], None)
    root = DraftNode(0, -1, 3, 8)
    requests = [DraftRequest(0, (root,), 4),
                DraftRequest(0, (DraftNode(1, 0, 4, 9), DraftNode(2, 0, 30, 9)), 4),  # 4 is looked up
                DraftRequest(0, (DraftNode(3, 1, 5, 10), DraftNode(4, 1, 31, 10)), 2)]
    looked_up = 0
    for request in requests:
        drafted, found = (drafter.expand(request) for drafter in apart)
        got = together.expand(request)
        expected = merge(drafted, found, request.children)
        assert got.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(got.scores, expected.scores, rtol=1e-5)
        assert np.isfinite(got.scores).all()  # a model knows as many children as are asked for
        looked_up += int(np.isfinite(found.scores).sum())
    assert looked_up == 3  # 4 after the root, 5 below it, 6 below that; nothing after 30 and 31
