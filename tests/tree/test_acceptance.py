"""The acceptance rule, on small trees that are drawn here; on random ones see test_draft_tree."""

from __future__ import annotations

from flowspec_edge.tree.acceptance import accepted_path
from flowspec_edge.tree.draft_tree import DraftTree

A, B, C, D, OTHER = range(5)


def drawn() -> DraftTree:
    """root - (A - (B - C), D); the root and A have been sent, as numbers 0 and 1."""
    tree = DraftTree(9, 0)
    a = tree.add(tree.root, A, -0.1)
    tree.add(tree.root, D, -2.0)
    tree.add(tree.add(a, B, -0.2), C, -0.3)
    tree.mark_sent(tree.root, 0)
    tree.mark_sent(a, 1)
    return tree


def accepted(tree: DraftTree) -> tuple[list[int], int]:
    path, missed = accepted_path(tree)
    return [node.token for node in path], missed


def test_nothing_is_accepted_before_the_root_is_verified() -> None:
    tree = drawn()
    tree.record(1, B)
    assert accepted(tree) == ([], -1)


def test_the_path_ends_at_the_first_unverified_node() -> None:
    tree = drawn()
    tree.record(0, A)
    assert accepted(tree) == ([A], -1)
    tree.record(1, B)
    assert accepted(tree) == ([A, B], -1)


def test_an_unlikely_child_is_followed_as_well() -> None:
    tree = drawn()
    tree.record(0, D)
    assert accepted(tree) == ([D], -1)


def test_a_token_that_no_child_carries_is_a_miss() -> None:
    tree = drawn()
    tree.record(0, A)
    tree.record(1, OTHER)
    assert accepted(tree) == ([A], OTHER)
    tree = drawn()
    tree.record(0, OTHER)
    assert accepted(tree) == ([], OTHER)
