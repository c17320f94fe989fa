"""Megatron-LM: EAGLE-2's tree verified whole by tensor parallelism (baseline of the FlowSpec paper).

Every layer is split over all verification devices, with two all-reduces a layer; so the tree is one
segment that all devices work on at once.
"""

from __future__ import annotations

from flowspec_edge.strategies.whole_tree import WholeTree


class Megatron(WholeTree):
    """The whole tree, all devices at once, two all-reduces a layer."""

    name = "megatron"
    summary = "tensor parallelism: the whole tree at once, two all-reduces a layer (Megatron-LM)"
    parallelism = "megatron"
