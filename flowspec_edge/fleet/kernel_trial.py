"""Does a kind of weights multiply right on this device?  Run as a process, since it may not survive it.

A library that was built for another GPU imports well and ends the process at its first kernel; a kernel
that fails leaves its CUDA context unusable.  So every product is tried out in a child process that writes a
line of JSON for each kind; the lines tell at which kind the process died.  A child whose context is unusable
ends, and the next kind has another.  Knows products and how to check them.  Does not time anything
(``kernels``).

    python -m flowspec_edge.fleet.kernel_trial '{"kinds": ["bf16", "nf4"], "device": "cuda", ...}'
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError
from flowspec_edge.stage.quant import KINDS as QUANTISED
from flowspec_edge.stage.quant import scheme
from flowspec_edge.stage.quant_bnb import EXPANDING
from flowspec_edge.stage.quant_grouped import kernel as int4_kernel
from flowspec_edge.tensors import DTYPES, parse_dtype
from flowspec_edge.torchdevice import use_exact_kernels

KINDS = ("fp32", "bf16", "fp16", *QUANTISED)  # weights in full, and in 4 bits
_LARGEST = 1024  # rows and columns of what is tried out
_PATIENCE_S = 300.0  # for a child: it imports torch, on a small board, and maybe compiles kernels
# Of the largest result: a few roundings of the type that the kernel computes in.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-8}
BNB = ("nf4", "fp4")  # bitsandbytes'
_UNUSABLE = 77  # exit code of a child that has reported the trial which left the GPU's context unusable
_QUANTISED_WITHIN = 0.2  # of the weights' norm; 4 bits lose about 0.1


@dataclass(frozen=True)
class Trial:
    """How a kind fared.

    why    in words, where it does not work; where it does, what else there is to say
    error  of the largest result, against float64; None where there was no result
    """

    kind: str
    works: bool
    why: str = ""
    error: float | None = None


@dataclass(frozen=True)
class Wish:
    """What to try: products of ``rows`` rows with a matrix of ``shape`` (outputs, inputs), the activations
    of 4-bit kinds in ``dtype``."""

    kinds: tuple[str, ...]
    device: str
    shape: tuple[int, int]
    rows: tuple[int, ...]
    dtype: str


def try_kinds(wish: Wish) -> list[Trial]:
    """Try every kind, in as many child processes as it takes; in the order of ``wish.kinds``."""
    return in_children(__name__, wish.kinds, lambda left: json.dumps(asdict(replace(wish, kinds=left))))


def in_children(module: str, kinds: Sequence[str], argument: Callable[[tuple[str, ...]], str]) -> list[Trial]:
    """The trials of ``kinds``, in their order, each of which may end its process.

    module    run as a program with one argument; it writes a ``Trial`` in JSON, a line, for each kind
    argument  for the kinds that are still to be tried
    """
    trials: list[Trial] = []
    while len(trials) < len(kinds):
        left = tuple(kinds[len(trials):])
        trials += _child(module, left, argument(left))
    return trials


def _child(module: str, kinds: tuple[str, ...], argument: str) -> list[Trial]:
    """What one child process found; the last is the kind that ended it, unless it came to its own end."""
    command = [sys.executable, "-m", module, argument]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        code, out = run.returncode, run.stdout
        end = f"its kernel ended the process with code {code}"
        said = [line for line in run.stderr.splitlines() if line.strip()]
        if code and said:
            end += f": {said[-1].strip()}"
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        code, out = 0, raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        end = f"no answer in {_PATIENCE_S:.0f} s"
    lines = [line for line in out.splitlines() if line.startswith('{"kind"')]
    trials = [Trial(**json.loads(line)) for line in lines]
    if len(trials) < len(kinds) and not (trials and code == _UNUSABLE):
        trials.append(Trial(kinds[len(trials)], False, end))
    return trials


def report(trials: Iterable[Trial]) -> None:
    """Of a child process: a line of JSON for each trial, as they come; its end with a code of its own once
    the GPU's context is unusable."""
    for trial in trials:
        print(json.dumps(asdict(trial)), flush=True)
        if not trial.works and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(_UNUSABLE)  # at once: what else there is of CUDA would fail, too


def attempt(kind: str, wish: Wish) -> Trial:
    """Try one kind in this process."""
    return judged(kind, lambda: _error(kind, wish),
                  TOLERANCE[computed_in(kind, wish.dtype, torch.device(wish.device))])


def judged(kind: str, error_of: Callable[[], float], limit: float) -> Trial:
    """The trial of what makes the error ``error_of()``, in a share of the largest result."""
    try:
        error = error_of()
    except FlowspecError as failure:
        return Trial(kind, False, str(failure))
    except Exception as failure:  # whatever a kernel or its library may raise: that is the finding
        text = str(failure).strip().splitlines() or [type(failure).__name__]
        return Trial(kind, False, text[0])
    if not error <= limit:
        return Trial(kind, False, f"results are wrong by {error:.2g} of the largest",
                     error if math.isfinite(error) else None)
    return Trial(kind, True, "", error)


def activations(kind: str, dtype: str) -> torch.dtype:
    """The type of what enters a product: of a kind in full its own."""
    return DTYPES[kind] if kind in DTYPES else parse_dtype(dtype)


def computed_in(kind: str, dtype: str, device: torch.device) -> torch.dtype:
    """The type that a product rounds to.  int4's kernels compute in bf16 throughout; on a GPU they take fp16
    activations, too, and convert them."""
    taken = activations(kind, dtype)
    return torch.bfloat16 if kind == "int4" and int4_kernel(taken, device) else taken


def advisable(kind: str, capability: tuple[int, int] | None) -> bool:
    """Whether to shard models in ``kind`` for a GPU of this compute capability (None: for a CPU), if it works
    there."""
    return kind not in BNB or capability != EXPANDING


@torch.inference_mode()
def _error(kind: str, wish: Wish) -> float:
    """The greatest difference from float64, of the largest result, over all numbers of rows."""
    rows, columns = (min(side, _LARGEST) for side in wish.shape)
    dtype, device = activations(kind, wish.dtype), torch.device(wish.device)
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(rows, columns, generator=generator)
    if kind in DTYPES:
        held = weight.to(dtype)
        exact, product = held.double(), _dense(held.to(device))
    else:
        chosen = scheme(next(k for k in QUANTISED if k == kind))
        stored = chosen.quantise(weight.to(device))
        exact = chosen.dequantise(stored).cpu().double()
        lost = float((exact - weight).norm() / weight.norm())
        if not lost < _QUANTISED_WITHIN:
            raise FlowspecError(f"quantising loses {lost:.0%} of the weights' norm")
        product = chosen.linear(rows, columns, False, dtype, device)
        product.fill(stored)
    worst = 0.0
    for n in wish.rows:
        x = torch.randn(n, columns, generator=generator).to(dtype)
        expected = x.double() @ exact.T
        found: Tensor = product(x.to(device))
        difference = (found.cpu().double() - expected).abs().max() / expected.abs().max()
        worst = max(worst, float(difference)) if bool(difference.isfinite()) else float("inf")
    return worst


def _dense(weight: Tensor) -> torch.nn.Module:
    linear = torch.nn.Linear(1, 1, bias=False)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return linear


def main(arguments: Sequence[str]) -> None:
    """Try what the argument, a ``Wish`` in JSON, asks for; a line of JSON for each kind."""
    facts = json.loads(arguments[0])
    wish = Wish(tuple(facts["kinds"]), facts["device"], tuple(facts["shape"]), tuple(facts["rows"]),
                facts["dtype"])
    use_exact_kernels()
    report(attempt(kind, wish) for kind in wish.kinds)


if __name__ == "__main__":
    main(sys.argv[1:])
