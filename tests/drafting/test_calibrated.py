"""Calibrated drafts: at some positions right children below the first go missing, or right tokens come
first, and nothing else changes."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drafting.calibrated import CalibratedDrafter
from flowspec_edge.drafting.ngram import NgramDrafter
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.registry import STRATEGIES
from flowspec_edge.tree.draft_api import ABSENT, DraftNode, DraftRequest

CHILDREN = 3


@examples(60, quick=24)
@given(text=st.lists(st.integers(0, 4), min_size=12, max_size=40), read=st.integers(4, 11),
       share=st.sampled_from([0.0, 0.3, 0.7, 1.0]), seed=st.integers(0, 3),
       draw=st.randoms(use_true_random=False))
def test_a_walk_along_the_text(text: list[int], read: int, share: float, seed: int, draw: random.Random
                               ) -> None:
    """Against a twin without calibration: a row lacks the right child, the next best in its place, or is
    the twin's; at one position always the same, and never where the child is first or the path is another.
    """
    twin, drafter = NgramDrafter(3, 1), CalibratedDrafter(NgramDrafter(3, 1), text, share, seed)
    for each in (twin, drafter):
        each.reset(Sampling(), "draft", 1.0)
        each.commit(text[:read], None)
    ids, missing = count(1), dict[int, bool]()  # by position
    level: list[tuple[DraftNode, list[int]]] = [(DraftNode(0, -1, text[read - 1], read - 1), text[:read])]
    for _ in range(4):
        nodes = tuple(node for node, _ in level)
        plain = twin.expand(DraftRequest(0, nodes, CHILDREN + 1)).tokens.tolist()
        got = drafter.expand(DraftRequest(0, nodes, CHILDREN)).tokens.tolist()
        below = []
        for (node, path), whole, row in zip(level, plain, got, strict=True):
            at = node.position + 1
            right = text[at] if path == text[:at] and at < len(text) else None
            if right in whole[1:CHILDREN]:
                without = [token for token in whole if token != right]
                assert row in (whole[:CHILDREN], without)
                assert missing.setdefault(at, row == without) == (row == without)
            else:
                assert row == whole[:CHILDREN]
            for token in dict.fromkeys([*row, *([right] if right is not None else [])]):
                if token != ABSENT and draw.random() < 0.7:
                    below.append((DraftNode(next(ids), node.id, token, at), [*path, token]))
        level = below
        if not level:
            break
    assert share not in (0.0, 1.0) or set(missing.values()) <= {share == 0.0}


@examples(40, quick=16)
@given(text=st.lists(st.integers(0, 4), min_size=12, max_size=40), read=st.integers(4, 11),
       share=st.sampled_from([1.0, 1.3, 1.7, 2.0]), seed=st.integers(0, 3))
def test_right_tokens_come_first(text: list[int], read: int, share: float, seed: int) -> None:
    """Along the text and beside it: the twin's row, or the right token in front of the twin's others."""
    twin, drafter = NgramDrafter(3, 1), CalibratedDrafter(NgramDrafter(3, 1), text, share, seed)
    for each in (twin, drafter):
        each.reset(Sampling(), "draft", 1.0)
        each.commit(text[:read], None)
    changed = 0
    for depth, at in enumerate(range(read - 1, len(text) - 1)):
        beside = DraftNode(100 + depth, depth - 1, text[at] + 5, at)  # a sibling of the right node
        nodes = (DraftNode(depth, depth - 1, text[at], at), *([beside] if depth else []))
        [plain, *wrong] = twin.expand(DraftRequest(0, nodes, CHILDREN)).tokens.tolist()
        output = drafter.expand(DraftRequest(0, nodes, CHILDREN))
        [row, *others] = output.tokens.tolist()
        first = [text[at + 1], *(token for token in plain if token != text[at + 1])][:CHILDREN]
        assert row in (plain, first)
        assert others == wrong
        assert row != first or output.scores[0, 0] > -10
        assert share < 2 or row == first
        changed += row != plain
    assert share > 1 or not changed


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_stay_those_of_plain_decoding(model: Path, temperature: float) -> None:
    cluster = VirtualCluster(model, 2, load_profile("paper-7b"), right_children=1.4 if temperature else 0.4)
    plain = PlainDecoder(model)
    for seed, name in enumerate(STRATEGIES):
        request = Request([1, 2, 3, seed], name, 12, Sampling(temperature, seed=seed))
        tokens, _ = plain.generate(list(request.prompt), 12, request.sampling, frozenset())
        assert cluster.generate(request).tokens == tokens, name


@pytest.mark.slow
def test_fewer_right_children_make_shorter_rounds() -> None:
    demo = resolve_model("demo").path
    request = Request(list(range(40, 60)), "flowspec", 32)
    cluster, profile = VirtualCluster(demo, 4, load_profile("paper-7b")), load_profile("paper-7b")
    results = []
    for share in (2.0, 1.0, 0.5, 0.5, 0.0):
        cluster = cluster.under(profile, 4, share)
        results.append(cluster.generate(request))
    perfect, one, half, again, none = results
    assert half == again
    rounds = [result.stats.rounds for result in (perfect, one, half, none)]
    assert rounds == sorted(rounds)
    assert rounds[0] <= 1
    assert rounds[1] < rounds[3]
