"""TreeExpansion against EAGLE-2's definition, recomputed over the whole candidate tree by brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples

from flowspec_edge.tree.draft_api import DraftOutput
from flowspec_edge.tree.draft_tree import DraftTree, Node, TreeExpansion

Path = tuple[int, ...]


def child_scores(path: Path, width: int, seed: int) -> tuple[list[int], list[float]]:
    """A deterministic draft model: the children of a path, best first."""
    rng = np.random.default_rng([seed, *path])
    p = np.sort(rng.dirichlet(np.ones(width) * 0.5))[::-1]
    tokens = rng.permutation(50)[:width]
    return tokens.tolist(), np.log(np.maximum(p, 1e-12)).tolist()


def paths_in(tree: DraftTree) -> dict[Path, float]:
    found: dict[Path, float] = {}

    def visit(node: Node, path: Path) -> None:
        for token, child in node.children.items():
            found[(*path, token)] = child.score
            visit(child, (*path, token))

    visit(tree.root, ())
    return found


def brute_force(levels: int, width: int, keep: int, seed: int) -> dict[Path, float]:
    """Every level expands the best `width` of the level before; the best `keep` of all are kept."""
    everything: list[tuple[float, int, Path]] = []
    level: list[tuple[Path, float]] = [((), 0.0)]
    for depth in range(levels):
        candidates: list[tuple[Path, float]] = []
        for path, score in level:
            tokens, scores = child_scores(path, width, seed)
            candidates += [((*path, t), score + s) for t, s in zip(tokens, scores, strict=True)]
        candidates.sort(key=lambda c: -c[1])
        everything += [(-score, depth, path) for path, score in candidates]
        level = candidates[:width]
    everything.sort(key=lambda e: e[:2])
    return {path: -score for score, _, path in everything[:keep]}


def grow(tree: DraftTree, expansion: TreeExpansion, width: int, seed: int) -> None:
    while request := expansion.request():
        answers = []
        for asked in request.nodes:
            node = next(n for n in (tree.root, *tree.nodes()) if n.id == asked.id)
            path: list[int] = []
            step: Node | None = node
            while step is not None and step.parent is not None:
                path.append(step.token)
                step = step.parent
            answers.append(child_scores(tuple(reversed(path)), width, seed))
        tokens, scores = zip(*answers, strict=True)
        expansion.absorb(DraftOutput(np.array(tokens, np.int32), np.array(scores)))


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 40), st.integers(0, 10_000))
@examples(80, quick=32)
def test_growth_is_eagle2s_tree(levels: int, width: int, keep: int, seed: int) -> None:
    # Fewer kept than a level is wide would cut the frontier short; the papers keep more.
    keep = max(keep, width)
    tree = DraftTree(7, 3)
    grow(tree, TreeExpansion(tree, [tree.root], levels, width, keep), width, seed)
    expected = brute_force(levels, width, keep, seed)
    found = paths_in(tree)
    assert set(found) == set(expected)
    assert all(abs(found[p] - expected[p]) < 1e-12 for p in found)


def test_a_cut_between_passes_stops_what_it_removed() -> None:
    tree = DraftTree(7, 3)
    expansion = TreeExpansion(tree, [tree.root], 3, 2, 10)
    request = expansion.request()
    assert request is not None
    expansion.absorb(DraftOutput(np.array([[1, 2]], np.int32), np.array([[-0.5, -1.0]])))
    survivor = tree.root.children[2]
    tree.reroot([survivor])
    request = expansion.request()
    assert request is not None
    assert [n.id for n in request.nodes] == [survivor.id]
    assert request.root == survivor.id


def test_merging_adds_only_what_is_new() -> None:
    tree = DraftTree(7, 3)
    grow(tree, TreeExpansion(tree, [tree.root], 3, 4, 20), 4, seed=1)
    before = paths_in(tree)
    sent = tree.pop_unsent(5)
    for number, node in enumerate(sent):
        tree.mark_sent(node, number)
    grow(tree, TreeExpansion(tree, [tree.root], 3, 4, 20), 4, seed=1)
    assert paths_in(tree) == before
    assert {n.id for n in tree.pop_unsent(100)}.isdisjoint({n.id for n in sent})
