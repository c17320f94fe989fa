"""`flowspec doctor --gpu`: what explains a GPU's speed, and whether kernels and tokens are right on it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowspec_edge.boards.gpu_check.gpu_facts import available
from flowspec_edge.boards.probe.board import read_board
from flowspec_edge.boards.probe.checks import CHECKS, Check, CheckScope, judge
from flowspec_edge.boards.probe.compute_rules import ComputeDevice
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.util import procfs, torchdevice

GROUPS: tuple[CheckScope, ...] = ("device", "products", "operations", "tokens")


@dataclass(frozen=True)
class GpuReport:
    """What the checks of a device found.

    device      torch's, such as "cuda:1"
    capability  (8, 7) for Orin, None for a CPU
    """

    device: str
    name: str
    capability: tuple[int, int] | None
    checks: dict[CheckScope, list[Finding]]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> int:
        return sum(check.state == "failed" for checks in self.checks.values() for check in checks)

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the report, where a check has ``name`` beside ``check``; readers know both."""
        return {"ok": self.ok, "device": self.device, "name": self.name,
                "compute_capability": list(self.capability) if self.capability else None,
                "torch": torch.__version__, "cuda": torch.version.cuda,
                "checks": [{"group": group, "name": check.check, "error": check.error, **check.as_json()}
                           for group, checks in self.checks.items() for check in checks]}


def check_gpu(tokens: Sequence[Check[ComputeDevice]], device: str = "cuda",
              report: Callable[[str], None] = lambda doing: None) -> GpuReport:
    """Run all checks, in some minutes; raise UsageError if the device does not exist.

    tokens  the checks of the group "tokens", which simulate a cluster (``lab.token_check``)
    report  called with the name of each group as it begins
    """
    torch_device = torchdevice.require(device)
    on_gpu = torch_device.type == "cuda"
    compute_device = describe(device)
    checks: dict[CheckScope, list[Finding]] = {}
    for group in GROUPS:
        report(group)
        checks[group] = judge(group, compute_device, (*CHECKS, *tokens))
    name = torch.cuda.get_device_name(torch_device) if on_gpu else "CPU"
    return GpuReport(device, name, compute_device.capability, checks)


def describe(device: str) -> ComputeDevice:
    """Describe ``device``, which this machine must have."""
    at, memory = torch.device(device), procfs.sizes(Path("/proc/meminfo"))
    on_gpu = at.type == "cuda"
    return ComputeDevice(
        device, torch.cuda.get_device_capability(at) if on_gpu else None, read_board().l4t,
        bitsandbytes=importlib.util.find_spec("bitsandbytes") is not None, memory=memory,
        available=available(device, memory) if on_gpu else None, environment=dict(os.environ))
