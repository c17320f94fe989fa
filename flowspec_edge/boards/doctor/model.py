"""Whether a cluster file's model fits in the boards' free memory, and whether the draft device keeps up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flowspec_edge.boards.deploy.resolve import PLAN_DTYPES, Deployment, process_bytes, resolve_deployment
from flowspec_edge.boards.inventory import Inventory
from flowspec_edge.boards.planning.memory_check import MemoryCheck
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.manifest import DRAFT, stage_part


def check_model(inventory: Inventory, path: Path, available: Mapping[str, int]) -> dict[str, list[Finding]]:
    """Findings by board; an error in the cluster file ``path`` itself goes to the first board.

    available  bytes of memory of each reached board, flowspec's own service counted as free
    """
    try:
        deployment = resolve_deployment(inventory, path)
        needs = needed(deployment)
    except FlowspecError as error:
        return {inventory.device[0].name: [Finding("model", "failed", str(error), "see the cluster file")]}
    unknown = Finding("model", "unknown", f"{inventory.cluster.board_python} there does not tell",
                      "see board_python in the cluster file")
    found = {name: [judge_model(deployment.model.name, size, available[name])
                    if name in available else unknown] for name, size in needs.items()}
    found |= {device.name: [Finding("model", "ok", f"this board does nothing: {why}")]
              for device, why in deployment.left_out}
    if drafting := judge_draft_device(deployment):
        found[drafting[0]].append(drafting[1])
    return found


def judge_draft_device(deployment: Deployment) -> tuple[str, Finding] | None:
    """The draft device's name and the finding; None without profiles."""
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
    """Bytes of each board's service: weights, caches, and the process."""
    cluster, model, stages = deployment.cluster, deployment.model, deployment.ranges
    if model.sharded:
        manifest = model.require_manifest()
        parts = [manifest.part(name) for name in (DRAFT, *map(stage_part, range(len(stages))))]
        sizes = [part.weight_bytes + part.cache_bytes(*deployment.caches) for part in parts]
    else:
        problem = MemoryCheck(str(model.path), PLAN_DTYPES[cluster.dtype], cluster, deployment.at_once,
                          len(stages) + 1, {}).problem
        sizes = [problem.d0, *(problem.stage(hi - lo) for lo, hi in stages)]
    return {device.name: size + process_bytes(deployment, device)
            for device, size in zip(deployment.boards, sizes, strict=True)}


def judge_model(name: str, needs: int, available: int) -> Finding:
    """``needs`` and ``available`` in bytes."""
    found = f"this board's part of {name} needs {needs / 1e9:.1f} GB, {available / 1e9:.1f} GB are available"
    if needs > available:
        return Finding("model", "failed", found, "give it fewer layers, or all a shorter context or int4, or "
                                                 "end what else runs there")
    return Finding("model", "ok", found)
