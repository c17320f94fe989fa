"""`flowspec doctor --gpu`: what explains a GPU's speed, and whether kernels and tokens are right on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from flowspec_edge.boards.gpu_check import gpu_facts, operation_check
from flowspec_edge.boards.gpu_check.kernel_check import BNB, advisable, check_products
from flowspec_edge.boards.probe.board import read_board
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.util import torchdevice

Group = Literal["device", "products", "operations", "tokens"]
GROUPS = len(get_args(Group))

_SHAPE = (1024, 1024)
ROWS = (1, 4, 16, 17, 64)  # plain decoding, a small tree, a segment, one row more, a prefill's
_FULL = ("fp32", "fp16", "bf16")
PROMPTS = ("def fibonacci(n):\n", 'class Stack:\n    """A stack."""\n\n    def push(self, item):\n')
NEW_TOKENS = 48


@dataclass(frozen=True)
class GpuReport:
    """``device``: torch's, such as "cuda:1"; ``capability``: (8, 7) for Orin, None for a CPU.

    A finding that failed or was skipped says why; ``error`` is against float64.
    """

    device: str
    name: str
    capability: tuple[int, int] | None
    checks: dict[Group, list[Finding]]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> int:
        return sum(check.state == "failed" for checks in self.checks.values() for check in checks)

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "device": self.device, "name": self.name,
                "compute_capability": list(self.capability) if self.capability else None,
                "torch": torch.__version__, "cuda": torch.version.cuda,
                "checks": [{"group": group, "name": check.check, "state": check.state,
                            "found": check.found, "error": check.error}
                           for group, checks in self.checks.items() for check in checks]}


# Of a model's directory, a device, prompts, and tokens after each (``lab.token_check``).
CheckTokens = Callable[[Path, str, Sequence[Sequence[int]], int], list[Finding]]


def check_gpu(model: OpenModel, check_tokens: CheckTokens, device: str = "cuda", new_tokens: int = NEW_TOKENS,
              report: Callable[[str], None] = lambda doing: None) -> GpuReport:
    """Run all checks, in some minutes; UsageError if the device does not exist.

    model       unsharded and with an EAGLE head, such as the demonstration model
    new_tokens  after each of ``PROMPTS``
    report      called with the name of each group as it begins
    """
    found = torchdevice.require(device)
    on_gpu = found.type == "cuda"
    capability = torch.cuda.get_device_capability(found) if on_gpu else None
    report("device")
    checks: dict[Group, list[Finding]] = {"device": gpu_facts.check_gpu_facts(device, read_board().l4t)}
    report("products")
    checks["products"] = _products(device, capability)
    report("operations")
    checks["operations"] = operation_check.check_operations(device)
    report("tokens")
    prompts = [Tokenizer(model).encode(text) for text in PROMPTS]
    checks["tokens"] = check_tokens(Path(model.path), device, prompts, new_tokens)
    return GpuReport(device, torch.cuda.get_device_name(found) if on_gpu else "CPU", capability, checks)


def _products(device: str, capability: tuple[int, int] | None) -> list[Finding]:
    four: tuple[str, ...] = ("int4",)
    skipped: list[Finding] = []
    if importlib.util.find_spec("bitsandbytes"):
        four += BNB
    else:
        skipped = [Finding(kind, "skipped", "bitsandbytes is not installed: only models that were sharded in "
                                            f"{kind} need it") for kind in BNB]
    checks: list[Finding] = []
    for dtype, kinds in (("fp16", (*_FULL, *four)), ("bf16", four)):
        for result in check_products(kinds, device, _SHAPE, ROWS, dtype):
            name = result.check if result.check in _FULL else f"{result.check}, {dtype} activations"
            found = result.found
            if result.ok and not advisable(result.check, capability):
                found = ("right, but above 4 rows the whole matrix is expanded for every product: shard in "
                         "int4")
            checks.append(replace(result, check=name, found=found))
    return checks + skipped
