"""Whether a kind of weights multiplies correctly on a device.

A library built for another GPU imports without error and kills the process at its first kernel; a kernel that
fails leaves its CUDA context unusable.  So a child process checks the kinds and prints a line of JSON for
each; the next child continues after the kind at which the last one died.

    python -m flowspec_edge.fleet.gpu_check.kernel_check '{"kinds": ["bf16", "nf4"], "device": "cuda", ...}'
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.probe.findings import Finding
from flowspec_edge.stage.quant.base import KINDS as QUANTISED
from flowspec_edge.stage.quant.grouped import kernel as int4_kernel
from flowspec_edge.stage.quant.schemes import EXPANDING, scheme
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


@dataclass(frozen=True)
class ProductCheck:
    """``rows`` rows times a matrix of ``shape`` (outputs, inputs); ``dtype``: activations of 4-bit kinds."""

    kinds: tuple[str, ...]
    device: str
    shape: tuple[int, int]
    rows: tuple[int, ...]
    dtype: str


def check_products(wanted: ProductCheck) -> list[Finding]:
    return run_in_children(__name__, wanted.kinds,
                           lambda left: json.dumps(asdict(replace(wanted, kinds=left))))


def run_in_children(module: str, kinds: Sequence[str], argument: Callable[[tuple[str, ...]], str],
                    timeout_s: float | None = None) -> list[Finding]:
    """The results of ``kinds``, in their order, although each may kill its process.

    ``module`` prints a ``Finding`` as a line of JSON for each kind that ``argument`` gets.
    """
    results: list[Finding] = []
    while len(results) < len(kinds):
        left = tuple(kinds[len(results):])
        results += _child(module, left, argument(left), timeout_s or _TIMEOUT_S)
    return results


def _child(module: str, kinds: tuple[str, ...], argument: str, timeout_s: float) -> list[Finding]:
    """If the process died, the last result is the kind that killed it."""
    command = [sys.executable, "-m", module, argument]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        code, out = run.returncode, run.stdout
        end = f"its kernel ended the process with code {code}"
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


def report(results: Iterable[Finding]) -> None:
    """In a child process: print a line of JSON for each result; exit once the CUDA context is unusable."""
    for result in results:
        print(json.dumps(asdict(result)), flush=True)
        if not result.ok and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(_CONTEXT_LOST)  # at once: CUDA's own cleanup would fail, too


def attempt(kind: str, wanted: ProductCheck) -> Finding:
    return result_of(kind, lambda: _error(kind, wanted),
                     TOLERANCE[computed_in(kind, wanted.dtype, torch.device(wanted.device))])


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
        text = str(failure).strip().splitlines() or [type(failure).__name__]
        return Finding(kind, "failed", text[0])


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
def _error(kind: str, wanted: ProductCheck) -> float:
    """The greatest difference from float64 over all numbers of rows, relative to the largest result."""
    rows, columns = (min(side, _MAX_SIDE) for side in wanted.shape)
    dtype, device = activations(kind, wanted.dtype), torch.device(wanted.device)
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(rows, columns, generator=generator)
    if kind in DTYPES:
        held = weight.to(dtype)
        exact = held.double()
        product: Callable[[Tensor], Tensor] = partial(functional.linear, weight=held.to(device))
    else:
        chosen = scheme(next(k for k in QUANTISED if k == kind))
        stored = chosen.quantise(weight.to(device))
        exact = chosen.dequantise(stored).cpu().double()
        lost = float((exact - weight).norm() / weight.norm())
        if not lost < _QUANTISED_WITHIN:
            raise FlowspecError(f"quantising loses {lost:.0%} of the weights' norm")
        product = linear = chosen.linear(rows, columns, False, dtype, device)
        linear.fill(stored)
    worst = 0.0
    for n in wanted.rows:
        x = torch.randn(n, columns, generator=generator).to(dtype)
        expected = x.double() @ exact.T
        found = product(x.to(device))
        difference = (found.cpu().double() - expected).abs().max() / expected.abs().max()
        worst = max(worst, float(difference)) if bool(difference.isfinite()) else float("inf")
    return worst


def main(arguments: Sequence[str]) -> None:
    facts = json.loads(arguments[0])
    wanted = ProductCheck(tuple(facts["kinds"]), facts["device"], tuple(facts["shape"]), tuple(facts["rows"]),
                          facts["dtype"])
    use_exact_kernels()
    report(attempt(kind, wanted) for kind in wanted.kinds)


if __name__ == "__main__":
    main(sys.argv[1:])
