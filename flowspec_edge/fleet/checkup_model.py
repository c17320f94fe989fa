"""Whether the model of a cluster file fits on its boards, by the memory that they have now.

Knows what each board is to hold, and asks how much is available there.  Does not choose boards
(``deployment``).
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.checkup import Finding
from flowspec_edge.fleet.deployment import PLAN_DTYPES, Deployment, resolve_deployment
from flowspec_edge.fleet.fitting import Fitting
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.preflight import probe
from flowspec_edge.fleet.requirements import PROCESS_BYTES
from flowspec_edge.manifest import DRAFT, Manifest, stage_part
from flowspec_edge.runtime.coordinator import cache_rows
from flowspec_edge.strategies.params import Params


def check_model(inventory: Inventory, path: Path) -> dict[str, Finding]:
    """By the boards' names, of those that can be asked; what is wrong with the cluster file ``path`` itself
    is the first board's."""
    try:
        deployment = resolve_deployment(inventory, path)
        needs = needed(deployment)
    except FlowspecError as error:
        return {inventory.device[0].name: Finding("model", "failed", str(error), "see the cluster file")}

    def one(device: DeviceEntry) -> Finding:
        try:
            told = json.loads(probe(inventory, device, "print(json.dumps(memory(own_processes())))"))
            available = told["available"] + told["held"]  # what our own service holds is to be used anew
        except (FlowspecError, ValueError, KeyError):
            return Finding("model", "unknown", f"{inventory.cluster.board_python} there does not tell",
                           "see board_python in the cluster file")
        return judge_model(deployment.model.name, needs[device.name], available)

    with ThreadPoolExecutor(len(needs)) as pool:
        found = dict(zip(needs, pool.map(one, deployment.boards), strict=True))
    return found | {device.name: Finding("model", "ok", f"this board does nothing: {why}")
                    for device, why in deployment.left_out}


def check_draft_device(inventory: Inventory, path: Path) -> tuple[str, Finding] | None:
    """The draft device's name, and whether it keeps up with the stages by their profiles; None where that is
    not known.  What is wrong with the cluster file :func:`check_model` says."""
    try:
        deployment = resolve_deployment(inventory, path)
    except FlowspecError:
        return None
    return judge_draft_device(deployment)


def judge_draft_device(deployment: Deployment) -> tuple[str, Finding] | None:
    """See :func:`check_draft_device`."""
    name, turn = deployment.draft.name, deployment.turn
    if turn is None:
        return None
    found = (f"{1e3 * turn.seconds:.3g} ms a turn, the slowest stage {1e3 * turn.slot:.3g} ms, "
             "by their profiles")
    if turn.is_bottleneck:
        return name, Finding("draft device", "warning", f"{found}: the stages will wait for it",
                             "let it compute on its GPU (torch_device), or a faster board draft; measure it "
                             "with flowspec device profile")
    return name, Finding("draft device", "ok", found)


def needed(deployment: Deployment) -> dict[str, int]:
    """Bytes of memory of each board's service, by the boards' names: weights, caches, and the process."""
    cluster, model, stages = deployment.cluster, deployment.model, deployment.ranges
    if model.sharded:
        manifest = Manifest.read(model.path)
        rows = cache_rows(cluster.context, deployment.at_once, Params(), len(stages))
        parts = [manifest.part(name) for name in (DRAFT, *map(stage_part, range(len(stages))))]
        sizes = [part.weight_bytes + rows * part.row_bytes for part in parts]
    else:
        problem = Fitting(str(model.path), PLAN_DTYPES[cluster.dtype], cluster, deployment.at_once,
                          len(stages) + 1, {}).problem
        sizes = [problem.d0, *(problem.stage(hi - lo, i == 0) for i, (lo, hi) in enumerate(stages))]
    return {device.name: size + PROCESS_BYTES
            for device, size in zip(deployment.boards, sizes, strict=True)}


def judge_model(name: str, needs: int, available: int) -> Finding:
    """Both in bytes."""
    found = f"this board's part of {name} needs {needs / 1e9:.1f} GB, {available / 1e9:.1f} GB are available"
    if needs > available:
        return Finding("model", "failed", found, "give it fewer layers, or all a shorter context or int4, or "
                                                 "end what else runs there")
    return Finding("model", "ok", found)
