"""`flowspec doctor --gpu`: whether a GPU computes correctly, kernel by kernel and token by token."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from flowspec_edge.fleet.gpu_check import operation_check, token_check
from flowspec_edge.fleet.gpu_check.kernel_check import (
    BNB,
    CheckResult,
    ProductCheck,
    advisable,
    check_products,
)
from flowspec_edge.model.modeldir import ModelDir
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.util import torchdevice

Group = Literal["products", "operations", "tokens"]

_SHAPE = (1024, 1024)
ROWS = (1, 4, 16, 17, 64)  # plain decoding, a small tree, a segment, one row more, a prefill's
_FULL = ("fp32", "fp16", "bf16")
PROMPTS = ("def fibonacci(n):\n", 'class Stack:\n    """A stack."""\n\n    def push(self, item):\n')
NEW_TOKENS = 48


@dataclass(frozen=True)
class GpuCheck:
    """``error``: against float64, relative to the largest result; ``found``: why it failed or was skipped."""

    group: Group
    name: str
    state: Literal["ok", "failed", "skipped"]
    found: str = ""
    error: float | None = None


@dataclass(frozen=True)
class GpuReport:
    """``device``: torch's, such as "cuda:1"; ``capability``: (8, 7) for Orin, None for a CPU."""

    device: str
    name: str
    capability: tuple[int, int] | None
    checks: list[GpuCheck]

    @property
    def ok(self) -> bool:
        return all(check.state != "failed" for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "device": self.device, "name": self.name,
                "compute_capability": list(self.capability) if self.capability else None,
                "torch": torch.__version__, "cuda": torch.version.cuda,
                "checks": [asdict(check) for check in self.checks]}


def check_gpu(model: ModelDir, device: str = "cuda", dtypes: Sequence[str] = token_check.DTYPES,
              new_tokens: int = NEW_TOKENS, report: Callable[[str], None] = lambda doing: None) -> GpuReport:
    """Run all checks, in some minutes; UsageError if the device does not exist.

    model       unsharded and with an EAGLE head, such as the demonstration model
    new_tokens  after each of ``PROMPTS``
    report      called with the name of each group as it begins
    """
    found = torchdevice.require(device)
    on_gpu = found.type == "cuda"
    capability = torch.cuda.get_device_capability(found) if on_gpu else None
    report("products")
    checks = _products(device, capability)
    report("operations")
    checks += [_check("operations", result.kind, result)
               for result in operation_check.check_operations(device)]
    report("tokens")
    prompts = [Tokenizer(model).encode(text) for text in PROMPTS]
    checks += [_check("tokens", result.kind, result) for result in token_check.check_tokens(
        Path(model.path), device, prompts, new_tokens, token_check.token_kinds(dtypes))]
    return GpuReport(device, torch.cuda.get_device_name(found) if on_gpu else "CPU", capability, checks)


def _products(device: str, capability: tuple[int, int] | None) -> list[GpuCheck]:
    four: tuple[str, ...] = ("int4",)
    skipped: list[GpuCheck] = []
    if importlib.util.find_spec("bitsandbytes"):
        four += BNB
    else:
        skipped = [GpuCheck("products", kind, "skipped", "bitsandbytes is not installed: only models that "
                            f"were sharded in {kind} need it") for kind in BNB]
    checks: list[GpuCheck] = []
    for dtype, kinds in (("fp16", (*_FULL, *four)), ("bf16", four)):
        for result in check_products(ProductCheck(kinds, device, _SHAPE, ROWS, dtype)):
            name = result.kind if result.kind in _FULL else f"{result.kind}, {dtype} activations"
            check = _check("products", name, result)
            if result.works and not advisable(result.kind, capability):
                check = GpuCheck("products", name, "ok", "right, but above 4 rows the whole matrix is "
                                 "expanded for every product: shard in int4", result.error)
            checks.append(check)
    return checks + skipped


def _check(group: Group, name: str, result: CheckResult) -> GpuCheck:
    return GpuCheck(group, name, "ok" if result.works else "failed", result.why, result.error)
