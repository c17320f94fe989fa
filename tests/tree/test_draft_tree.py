"""The draft tree against a brute-force model of it: plain sets of paths."""

from __future__ import annotations

import math
from typing import NoReturn

from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples

from flowspec_edge.tree.acceptance import accepted_path
from flowspec_edge.tree.draft_tree import DraftTree, Node

Path = tuple[int, ...]


def path_of(node: Node) -> Path:
    """Tokens from below the root to the node."""
    tokens: list[int] = []
    step: Node | None = node
    while step is not None and step.parent is not None:
        tokens.append(step.token)
        step = step.parent
    return tuple(reversed(tokens))


def build(paths: list[Path], scores: dict[Path, float]) -> tuple[DraftTree, dict[Path, Node]]:
    tree = DraftTree(token=99, position=10)
    nodes: dict[Path, Node] = {(): tree.root}
    for path in paths:
        for depth in range(1, len(path) + 1):
            prefix = path[:depth]
            if prefix not in nodes:
                nodes[prefix] = tree.add(nodes[prefix[:-1]], prefix[-1], scores[prefix])
    return tree, nodes


def falling(paths: list[Path], steps: list[float]) -> dict[Path, float]:
    """Cumulative scores: every prefix costs its own step."""
    scores: dict[Path, float] = {(): 0.0}
    for path in paths:
        for depth in range(1, len(path) + 1):
            prefix = path[:depth]
            if prefix not in scores:
                scores[prefix] = scores[prefix[:-1]] - steps[hash(prefix) % len(steps)]
    return scores


some_paths = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple), min_size=1, max_size=30)
some_steps = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=3, max_size=7)


@given(some_paths, some_steps, st.integers(1, 9))
def test_takes_in_score_order_and_never_a_child_first(
    paths: list[Path], steps: list[float], limit: int
) -> None:
    scores = falling(paths, steps)
    tree, nodes = build(paths, scores)
    order: list[Path] = []
    number = 0
    while batch := tree.pop_unsent(limit):
        assert len(batch) <= limit
        for node in batch:
            order.append(path_of(node))
            tree.mark_sent(node, number)
            number += 1
    assert sorted(order) == sorted(p for p in nodes if p)
    assert [scores[p] for p in order] == sorted((scores[p] for p in order), reverse=True)
    seen: set[Path] = {()}
    for path in order:
        assert path[:-1] in seen
        seen.add(path)


@given(some_paths, some_steps, st.data())
def test_acceptance_and_rerooting_agree_with_sets_of_paths(
    paths: list[Path], steps: list[float], data: st.DataObject
) -> None:
    tree, nodes = build(paths, falling(paths, steps))
    sent = tree.pop_unsent(data.draw(st.integers(0, len(nodes))))
    for number, node in enumerate(sent):
        tree.mark_sent(node, number)
    tree.mark_sent(tree.root, 1000)
    truth = {path_of(n): data.draw(st.integers(0, 4)) for n in (tree.root, *sent)}
    verified = {p for p in truth if data.draw(st.booleans())}
    for node in (tree.root, *sent):
        if path_of(node) in verified:
            assert tree.record(node.number, truth[path_of(node)])
    expected: Path = ()
    missed = -1
    while expected in verified:
        if (*expected, truth[expected]) not in nodes:
            missed = truth[expected]
            break
        expected = (*expected, truth[expected])
    path, miss = accepted_path(tree)
    assert tuple(n.token for n in path) == expected
    assert miss == missed
    tree.reroot(path)
    survivors = {p[len(expected):] for p in nodes if p[: len(expected)] == expected and p != expected}
    assert {path_of(n) for n in tree.nodes()} == survivors
    assert tree.size == len(survivors)
    assert all(n.alive for n in tree.nodes())
    gone = [n for p, n in nodes.items() if p[: len(expected)] != expected]
    assert not any(n.alive for n in gone)
    alive_sent = {n.number for n in (*tree.nodes(), tree.root) if n.number >= 0}
    assert set(tree.sent_nodes) == alive_sent


@given(some_paths, some_steps, st.data())
@examples(60, quick=24)
def test_rescoring_unsent_nodes_keeps_parents_first(
    paths: list[Path], steps: list[float], data: st.DataObject
) -> None:
    tree, nodes = build(paths, falling(paths, steps))
    sent = {id(n) for n in tree.pop_unsent(data.draw(st.integers(0, 5)))}
    for number, node in enumerate(n for n in nodes.values() if id(n) in sent):
        tree.mark_sent(node, number)
    for path, node in nodes.items():
        if path and data.draw(st.booleans()):
            assert node.parent is not None
            assert tree.add(node.parent, node.token, data.draw(st.floats(-9, 0))) is node
    left = tree.pop_unsent(10_000)
    assert {id(n) for n in left} == {id(n) for p, n in nodes.items() if p} - sent
    seen = {id(tree.root)} | sent
    for node in left:
        assert id(node.parent) in seen
        seen.add(id(node))


def test_layer_order_sends_shallow_nodes_first() -> None:
    tree = DraftTree(0, 0, order="layer")
    a = tree.add(tree.root, 1, math.log(0.9))
    deep = tree.add(a, 2, math.log(0.8))
    b = tree.add(tree.root, 3, math.log(0.1))
    assert [n.id for n in tree.pop_unsent(3)] == [a.id, b.id, deep.id]


def test_rerooting_touches_only_what_it_removes() -> None:
    """The surviving subtree is not visited: its nodes would raise if they were."""

    class Guarded(dict[int, Node]):
        def _visited(self, *_: object) -> NoReturn:
            raise AssertionError("a surviving node was visited")

        values = items = keys = __iter__ = _visited  # type: ignore[assignment]

    tree = DraftTree(0, 0)
    keep = tree.add(tree.root, 1, -0.1)
    drop = tree.add(tree.root, 2, -0.2)
    tree.add(drop, 3, -0.3)
    for token in range(50):
        tree.add(keep, token, -1.0)
    keep.children = Guarded(keep.children)
    tree.reroot([keep])
    assert not drop.alive
    assert tree.size == 50
