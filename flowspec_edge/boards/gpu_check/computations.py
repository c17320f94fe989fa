"""Computes on this machine in child processes: the facts of the checks that compute.

A library built for another GPU imports without error and kills the process at its first kernel; a kernel that
fails leaves its CUDA context unusable.  So a child process computes, and prints a line of JSON for each
result; the next child continues after the computation at which the last one died.

    python -m flowspec_edge.boards.gpu_check.computations < [{"name": …, "function": …, "arguments": …}]
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from flowspec_edge.errors import FlowspecError, ended, first_line
from flowspec_edge.util.interpreter import module_command

TIMEOUT_S = 300.0
_CONTEXT_LOST = 77  # exit code of a child whose last result left the CUDA context unusable
_CUT_OFF = -256  # in place of the exit code of a child that did not end in time
_OUT_OF_MEMORY_SCORE = "/proc/self/oom_score_adj"


class Deviation(NamedTuple):
    """How far results are from the right ones.

    error    relative to the largest result; 0.0 if every value is the same
    rounded  the type that results are rounded to: "fp32", "fp16", "bf16"; "": they must be exact
    """

    error: float
    rounded: str = ""


@dataclass(frozen=True)
class Computation:
    """A call of a function in a child process.

    name       of the result
    function   "module:function"; it returns a ``Deviation``, or a text
    arguments  which travel as JSON
    timeout_s  of a child, which imports torch and may compile kernels
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    @property
    def module(self) -> str:
        return self.function.partition(":")[0]


@dataclass(frozen=True)
class ComputationResult:
    """What a computation gave; the fields of ``Deviation``, None and "" without one.

    message  the text that its function returned
    fault    what was raised, or how the process ended; "" if all went well
    """

    name: str
    error: float | None = None
    rounded: str = ""
    message: str = ""
    fault: str = ""


def compute(computations: Sequence[Computation]) -> dict[str, ComputationResult]:
    """Return the results by name, in order, although each computation may kill its process.

    Neighbours from one module with one time limit share a process, so that torch is imported once.
    """
    results: list[ComputationResult] = []
    for (_, timeout_s), group in groupby(computations, key=attrgetter("module", "timeout_s")):
        remaining = list(group)
        while remaining:
            batch = _child(remaining, timeout_s)
            results += batch
            remaining = remaining[len(batch):]
    return {result.name: result for result in results}


def _child(computations: Sequence[Computation], timeout_s: float) -> list[ComputationResult]:
    """Run computations in a child process and return at least one result.

    If the process died, the last result is that of the computation that killed it.
    """
    command = module_command(__name__)
    questions = json.dumps([asdict(computation) for computation in computations])
    try:
        run = subprocess.run(command, input=questions, capture_output=True, text=True, timeout=timeout_s, check=False)
        code, out = run.returncode, run.stdout
        end = f"its kernel ended the process: {ended(code)}"
        error_lines = [line for line in run.stderr.splitlines() if line.strip()]
        if code and error_lines:
            end += f": {error_lines[-1].strip()}"
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        code, out = _CUT_OFF, raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        end = f"no answer in {timeout_s:.0f} s"
    lines = [line for line in out.splitlines() if line.startswith('{"name"')]
    results = [ComputationResult(**json.loads(line)) for line in lines]
    # What was cut off gets a process, and the whole time, of its own.
    if len(results) < len(computations) and not (results and code in (_CONTEXT_LOST, _CUT_OFF)):
        results.append(ComputationResult(computations[len(results)].name, fault=end))
    return results


def attempt(computation: Computation) -> ComputationResult:
    """Compute in this process; any exception is a fault, as kernels and libraries may raise anything."""
    try:
        function = getattr(importlib.import_module(computation.module), computation.function.partition(":")[2])
        outcome = function(**computation.arguments)
    except FlowspecError as failure:
        return ComputationResult(computation.name, fault=str(failure))
    except Exception as failure:
        return ComputationResult(computation.name, fault=first_line(failure))
    if isinstance(outcome, str):
        return ComputationResult(computation.name, message=outcome)
    return ComputationResult(computation.name, *outcome)


def main() -> None:
    """Print a line of JSON for each computation, in a child process; exit once the CUDA context is unusable."""
    computations = [Computation(**fields) for fields in json.load(sys.stdin)]
    with suppress(OSError), open(_OUT_OF_MEMORY_SCORE, "w", encoding="ascii") as score:
        score.write("1000")  # if memory runs out, the kernel kills this process and no other
    import torch

    from flowspec_edge.util.torchdevice import use_exact_kernels

    use_exact_kernels()
    for computation in computations:
        result, lost = attempt(computation), ""
        if torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as failure:
                lost = first_line(failure)
        if lost and not result.fault:
            result = ComputationResult(computation.name, fault=lost)
        print(json.dumps(asdict(result)), flush=True)
        if lost:
            os._exit(_CONTEXT_LOST)  # at once: CUDA's own cleanup would fail, too


if __name__ == "__main__":
    main()
