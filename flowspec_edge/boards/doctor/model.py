"""What a cluster file's model asks of each board: memory, and the draft device's time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flowspec_edge.boards.deploy.resolve import (
    PLAN_DTYPES,
    Deployment,
    d0_bytes,
    drafting,
    process_bytes,
    resolve_deployment,
)
from flowspec_edge.boards.inventory import Inventory
from flowspec_edge.boards.planning.memory_check import MemoryCheck
from flowspec_edge.boards.probe.service_rules import BoardPart
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.manifest import stage_part


def board_parts(inventory: Inventory, path: Path, available: Mapping[str, int]) -> dict[str, BoardPart]:
    """Return what the model asks of each board.

    An error in the cluster file ``path`` itself goes to the first board.

    available  bytes of memory of each reached board, flowspec's own service counted as free
    """
    try:
        return parts_of(resolve_deployment(inventory, path), available)
    except FlowspecError as error:
        return {inventory.device[0].name: BoardPart(error=str(error))}


def parts_of(deployment: Deployment, available: Mapping[str, int]) -> dict[str, BoardPart]:
    """Return what a resolved deployment asks of each board; ``available``: as for ``board_parts``."""
    name, python, d0 = deployment.model.name, deployment.cluster.board_python, deployment.draft.name
    parts = {board: BoardPart(name, size, available.get(board), python)
             for board, size in needed_bytes(deployment).items()}
    if turn := deployment.turn:
        parts[d0] = replace(parts[d0], turn=(turn.seconds, turn.slot), late=turn.is_bottleneck)
    return parts | {device.name: BoardPart(name, idle=why) for device, why in deployment.unused_boards}


def needed_bytes(deployment: Deployment) -> dict[str, int]:
    """Return the bytes of each board's service: weights, caches, and the process."""
    cluster, model, stages = deployment.cluster, deployment.model, deployment.ranges
    if model.sharded:
        manifest = model.require_manifest()
        parts = [manifest.part(stage_part(index)) for index in range(len(stages))]
        sizes = [d0_bytes(deployment, manifest),
                 *(part.weight_bytes + part.cache_bytes(*deployment.caches) for part in parts)]
    else:
        problem = MemoryCheck(str(model.path), PLAN_DTYPES[cluster.dtype], cluster, deployment.at_once,
                          len(stages) + 1, {}, drafting(cluster, model, deployment.head)).problem
        sizes = [problem.d0_part, *(problem.stage(hi - lo) for lo, hi in stages)]
    return {device.name: size + process_bytes(deployment, device)
            for device, size in zip(deployment.boards, sizes, strict=True)}
