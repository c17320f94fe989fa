"""The acceptance rule: follow the target's own tokens through the draft tree.

The target's token after a node is X = argmax(log p + g) (``sampling.rule``; greedy: no noise), whatever was
drafted, so the output is that of plain decoding.  The child with token X is accepted, then its child, and so
on; where no child has X, the round ends and X is the next root.
"""

from __future__ import annotations

from flowspec_edge.tree.draft_tree import DraftTree, Node


def accepted_path(tree: DraftTree) -> tuple[list[Node], int]:
    """The accepted nodes below the root, in order, and the token that no child has, or -1 while the path's
    end is unverified.  Accepted nodes may be verified, in flight or unsent (FlowSpec eq. 2)."""
    path: list[Node] = []
    node = tree.root
    while node.successor >= 0:
        child = tree.child(node, node.successor)
        if child is None:
            return path, node.successor
        path.append(child)
        node = child
    return path, -1
