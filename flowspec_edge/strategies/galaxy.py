"""Galaxy: tensor parallelism whose norms and residuals are split over the rows (FlowSpec's baseline).

Ring all-gathers and reduce-scatters take the place of the all-reduces and overlap with the matrix
products; rows are padded to a multiple of the devices.
"""

from __future__ import annotations

from flowspec_edge.strategies.whole_tree import WholeTree


class Galaxy(WholeTree):
    """The whole tree, all devices at once, ring collectives under the matrix products."""

    name = "galaxy"
    summary = "tensor parallelism with ring collectives overlapped with compute (Galaxy)"
    parallelism = "galaxy"
