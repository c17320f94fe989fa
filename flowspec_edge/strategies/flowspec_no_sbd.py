"""FlowSpec without score-based drafting: the same system, its segments in layer order (ablation)."""

from __future__ import annotations

from flowspec_edge.strategies.flowspec import FlowSpec


class FlowSpecNoSBD(FlowSpec):
    """Pruning and expansion as in FlowSpec; nodes leave shallow layers first."""

    name = "flowspec_no_sbd"
    summary = "FlowSpec with segments in layer order instead of score order (ablation)"
    order = "layer"
