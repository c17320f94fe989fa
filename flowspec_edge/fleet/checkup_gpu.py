"""Whether a GPU computes right, kernel by kernel and token by token: the test that the owner of a board runs.

Puts together what ``kernel_trial``, ``operation_trial`` and ``token_trial`` find, each in child processes.
Does not know terminals.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from flowspec_edge import torchdevice
from flowspec_edge.fleet import operation_trial, token_trial
from flowspec_edge.fleet.kernel_trial import BNB, Trial, Wish, advisable, try_kinds
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.text import Tokenizer

Group = Literal["products", "operations", "tokens"]

_SHAPE = (1024, 1024)
ROWS = (1, 4, 16, 17, 64)  # plain decoding, a small tree, a segment, one row more, a prefill's
_FULL = ("fp32", "fp16", "bf16")
PROMPTS = ("def fibonacci(n):\n", 'class Stack:\n    """A stack."""\n\n    def push(self, item):\n')
NEW_TOKENS = 48


@dataclass(frozen=True)
class Check:
    """One line of the report.

    state  "skipped" says in ``found`` why
    error  of the largest result, against float64; None where there is none
    """

    group: Group
    name: str
    state: Literal["ok", "failed", "skipped"]
    found: str = ""
    error: float | None = None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"group": self.group, "name": self.name, "state": self.state, "found": self.found,
                "error": self.error}


@dataclass(frozen=True)
class GpuReport:
    """What was found.

    device      torch's: "cuda", "cuda:1", or "cpu"
    name        the GPU's
    capability  its compute capability, (8, 7) for Orin; None of a CPU
    """

    device: str
    name: str
    capability: tuple[int, int] | None
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(check.state != "failed" for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The --json object."""
        return {"ok": self.ok, "device": self.device, "name": self.name,
                "compute_capability": list(self.capability) if self.capability else None,
                "torch": torch.__version__, "cuda": torch.version.cuda,
                "checks": [check.as_json() for check in self.checks]}


def check_gpu(model: ModelDir, device: str = "cuda", dtypes: Sequence[str] = token_trial.DTYPES,
              new_tokens: int = NEW_TOKENS, report: Callable[[str], None] = lambda doing: None) -> GpuReport:
    """Everything, on ``device``; takes a minute or a few.

    model       that generates, unsharded and with an EAGLE head: the demonstration model is made for it
    new_tokens  after each of ``PROMPTS``
    report      called with what is being tried

    UsageError for a device that is not there.
    """
    found = torchdevice.require(device)
    on_gpu = found.type == "cuda"
    capability = torch.cuda.get_device_capability(found) if on_gpu else None
    report("products")
    checks = _products(device, capability)
    report("operations")
    checks += [_check("operations", trial.kind, trial) for trial in operation_trial.try_operations(device)]
    report("tokens")
    prompts = [Tokenizer(model).encode(text) for text in PROMPTS]
    checks += [_check("tokens", trial.kind, trial) for trial in token_trial.try_tokens(
        Path(model.path), device, prompts, new_tokens, token_trial.token_kinds(dtypes))]
    return GpuReport(device, torch.cuda.get_device_name(found) if on_gpu else "CPU", capability, checks)


def _products(device: str, capability: tuple[int, int] | None) -> list[Check]:
    """Products with weights in full and in 4 bits; the latter with activations of both 16-bit types."""
    four: tuple[str, ...] = ("int4",)
    checks = []
    if importlib.util.find_spec("bitsandbytes"):
        four += BNB
    else:
        checks = [Check("products", kind, "skipped", "bitsandbytes is not installed: only models that were "
                        f"sharded in {kind} need it") for kind in BNB]
    tried: list[Check] = []
    for dtype, kinds in (("fp16", (*_FULL, *four)), ("bf16", four)):
        for trial in try_kinds(Wish(kinds, device, _SHAPE, ROWS, dtype)):
            name = trial.kind if trial.kind in _FULL else f"{trial.kind}, {dtype} activations"
            check = _check("products", name, trial)
            if trial.works and not advisable(trial.kind, capability):
                check = Check("products", name, "ok", "right, but above 4 rows the whole matrix is expanded "
                              "for every product: shard in int4", trial.error)
            tried.append(check)
    return tried + checks


def _check(group: Group, name: str, trial: Trial) -> Check:
    return Check(group, name, "ok" if trial.works else "failed", trial.why, trial.error)
