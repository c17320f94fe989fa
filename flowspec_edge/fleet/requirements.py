"""What a deployment will take on each board: disk, memory, ports.

Knows a manifest's sums and what runs beside the weights.  Does not know whether a board has it
(``preflight``).
"""

from __future__ import annotations

from flowspec_edge.fleet.deployment import Deployment
from flowspec_edge.fleet.preflight import Needs
from flowspec_edge.fleet.services import BoardStatus, FleetStatus
from flowspec_edge.manifest import DRAFT, Manifest, stage_part
from flowspec_edge.runtime.coordinator import cache_rows
from flowspec_edge.strategies.params import Params

# A service's process beside weights and caches: interpreter, torch, transformers; 320 to 420 MB on a CPU.
# What a GPU's kernels take on top a profile knows, and the planner with it.
PROCESS_BYTES = 400_000_000
ENVIRONMENT_BYTES = 500_000_000  # wheels, and what they are unpacked to, beside the board's torch


def needs_of(deployment: Deployment, manifest: Manifest, status: FleetStatus) -> dict[str, Needs]:
    """By the boards' names; ``status`` tells what is there already and takes no more room."""
    cluster, stages = deployment.cluster, len(deployment.stages)
    rows = cache_rows(cluster.context, deployment.at_once, Params(), stages)
    now = {board.name: board for board in status.boards}
    found = {}
    for place, device in enumerate(deployment.boards):
        name = stage_part(place - 1) if place else DRAFT
        part, here = manifest.part(name), now[device.name]
        ports = (cluster.data_port,) if place else (cluster.control_port, cluster.data_port,
                                                    cluster.serve_port)
        found[device.name] = Needs(
            home_bytes=0 if here.current else ENVIRONMENT_BYTES,
            state_bytes=0 if _has(here, manifest, place) else part.size,
            memory_bytes=part.weight_bytes + rows * part.row_bytes + PROCESS_BYTES, ports=ports,
            dtype=manifest.dtype if place else "")
    return found


def _has(board: BoardStatus, manifest: Manifest, place: int) -> bool:
    """Whether the release that runs there has this part already."""
    return any(release is not None and release.model == manifest.request and release.stage == place
               for release in (board.current, board.previous))
