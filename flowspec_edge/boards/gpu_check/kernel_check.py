"""Whether a kind of weights multiplies correctly on a device.

A library built for another GPU imports without error and kills the process at its first kernel; a kernel that
fails leaves its CUDA context unusable.  So a child process checks the kinds, of this module or of another one
that has an ``attempt``, and prints a line of JSON for each; the next child continues after the kind at which
the last one died.

    python -m flowspec_edge.boards.gpu_check.kernel_check MODULE '{"kinds": ["bf16", "nf4"], "device": "cuda"}'
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.errors import FlowspecError, ended, first_line
from flowspec_edge.stage.quant.base import KINDS as QUANTISED
from flowspec_edge.stage.quant.grouped import kernel as int4_kernel
from flowspec_edge.stage.quant.schemes import EXPANDING, scheme
from flowspec_edge.util.interpreter import module_command
from flowspec_edge.util.tensors import DTYPES, parse_dtype
from flowspec_edge.util.torchdevice import use_exact_kernels

KINDS = ("fp32", "bf16", "fp16", *QUANTISED)  # weights in full, and in 4 bits
_MAX_SIDE = 1024  # rows and columns of a checked matrix
_TIMEOUT_S = 300.0  # of a child, which imports torch and may compile kernels
# Of the largest result: a few roundings of the type that the kernel computes in.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-8}
BNB = ("nf4", "fp4")  # bitsandbytes'
_CONTEXT_LOST = 77  # exit code of a child whose last result left the CUDA context unusable
_QUANTISED_WITHIN = 0.2  # of the weights' norm; 4 bits lose about 0.1
_OUT_OF_MEMORY_SCORE = "/proc/self/oom_score_adj"


def check_products(kinds: Sequence[str], device: str, shape: Sequence[int], rows: Sequence[int], dtype: str
                   ) -> list[Finding]:
    """``rows`` rows times a matrix of ``shape`` (outputs, inputs); ``dtype``: activations of 4-bit kinds."""
    return run_in_children(__name__, kinds, device=device, shape=shape, rows=rows, dtype=dtype)


def run_in_children(module: str, kinds: Sequence[str], *, timeout_s: float | None = None, **arguments: Any
                    ) -> list[Finding]:
    """What ``module.attempt(kind, **arguments)`` finds for ``kinds``, in their order, although each may kill
    its process.  ``arguments`` travel as JSON."""
    results: list[Finding] = []
    while len(results) < len(kinds):
        results += _child(module, kinds[len(results):], arguments, timeout_s or _TIMEOUT_S)
    return results


def _child(module: str, kinds: Sequence[str], arguments: dict[str, Any], timeout_s: float) -> list[Finding]:
    """If the process died, the last result is the kind that killed it."""
    command = module_command(__name__, module, json.dumps({"kinds": kinds, **arguments}))
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        code, out = run.returncode, run.stdout
        end = f"its kernel ended the process: {ended(code)}"
        said = [line for line in run.stderr.splitlines() if line.strip()]
        if code and said:
            end += f": {said[-1].strip()}"
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        code, out = 0, raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        end = f"no answer in {timeout_s:.0f} s"
    lines = [line for line in out.splitlines() if line.startswith('{"check"')]
    results = [Finding(**json.loads(line)) for line in lines]
    if len(results) < len(kinds) and not (results and code == _CONTEXT_LOST):
        results.append(Finding(kinds[len(results)], "failed", end))
    return results


def attempt(kind: str, device: str, shape: Sequence[int], rows: Sequence[int], dtype: str) -> Finding:
    return result_of(kind, lambda: _error(kind, torch.device(device), shape, rows, dtype),
                     TOLERANCE[computed_in(kind, dtype, torch.device(device))])


def result_of(kind: str, error_of: Callable[[], float], limit: float) -> Finding:
    """The result of a check with the relative error ``error_of()``, which may raise anything."""
    def compare() -> Finding:
        error = error_of()
        if error <= limit:
            return Finding(kind, "ok", error=error)
        return Finding(kind, "failed", f"results are wrong by {error:.2g} of the largest",
                       error=error if math.isfinite(error) else None)

    return guarded(kind, compare)


def guarded(kind: str, check: Callable[[], Finding]) -> Finding:
    """The result of ``check``; any exception is a failure, as kernels and libraries may raise anything."""
    try:
        return check()
    except FlowspecError as failure:
        return Finding(kind, "failed", str(failure))
    except Exception as failure:
        return Finding(kind, "failed", first_line(failure))


def activations(kind: str, dtype: str) -> torch.dtype:
    """The activations' type in a product; unquantised kinds use their own."""
    return DTYPES[kind] if kind in DTYPES else parse_dtype(dtype)


def computed_in(kind: str, dtype: str, device: torch.device) -> torch.dtype:
    """The type that a product rounds to: bf16 in int4's kernels, even on a GPU with fp16 activations."""
    taken = activations(kind, dtype)
    return torch.bfloat16 if kind == "int4" and int4_kernel(taken, device) else taken


def advisable(kind: str, capability: tuple[int, int] | None) -> bool:
    """Whether to shard models in ``kind`` for a GPU of this capability (None: CPU), if the kind works."""
    return kind not in BNB or capability != EXPANDING


@torch.inference_mode()
def _error(kind: str, device: torch.device, shape: Sequence[int], rows: Sequence[int], dtype: str) -> float:
    """The greatest difference from float64 over all numbers of rows, relative to the largest result."""
    outputs, inputs = (min(side, _MAX_SIDE) for side in shape)
    taken = activations(kind, dtype)
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(outputs, inputs, generator=generator)
    if kind in DTYPES:
        held = weight.to(taken)
        exact = held.double()
        product: Callable[[Tensor], Tensor] = partial(functional.linear, weight=held.to(device))
    else:
        chosen = scheme(next(k for k in QUANTISED if k == kind))
        stored = chosen.quantise(weight.to(device))
        exact = chosen.dequantise(stored).cpu().double()
        lost = float((exact - weight).norm() / weight.norm())
        if not lost < _QUANTISED_WITHIN:
            raise FlowspecError(f"quantising loses {lost:.0%} of the weights' norm")
        product = linear = chosen.linear(outputs, inputs, False, taken, device)
        linear.fill(stored)
    worst = 0.0
    for n in rows:
        x = torch.randn(n, inputs, generator=generator).to(taken)
        expected = x.double() @ exact.T
        found = product(x.to(device))
        difference = (found.cpu().double() - expected).abs().max() / expected.abs().max()
        worst = max(worst, float(difference)) if bool(difference.isfinite()) else float("inf")
    return worst


def main(module: str, asked: str) -> None:
    """In a child process: print a line of JSON for each kind; exit once the CUDA context is unusable."""
    arguments = json.loads(asked)
    kinds = arguments.pop("kinds")
    with suppress(OSError), open(_OUT_OF_MEMORY_SCORE, "w", encoding="ascii") as score:
        score.write("1000")  # if memory runs out, the kernel kills this process and no other
    use_exact_kernels()
    attempt_of = importlib.import_module(module).attempt
    for kind in kinds:
        finding = attempt_of(kind, **arguments)
        print(json.dumps(asdict(finding)), flush=True)
        if not finding.ok and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(_CONTEXT_LOST)  # at once: CUDA's own cleanup would fail, too


if __name__ == "__main__":
    main(*sys.argv[1:])
