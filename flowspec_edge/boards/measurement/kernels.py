"""Times matrix products by kind of weights: 16 or 32 bits, bitsandbytes' 4 bits, grouped int4.

``gpu_check.computations`` first tries the kinds in child processes; the working ones are timed in turn, so that
disturbances affect all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flowspec_edge.boards.gpu_check.computations import compute
from flowspec_edge.boards.gpu_check.kernel_check import KINDS, activations
from flowspec_edge.boards.measurement.fit import rounded
from flowspec_edge.boards.probe.compute_rules import advisable, computed, product
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.device_profile import Int4Cost
from flowspec_edge.errors import UsageError
from flowspec_edge.stage.preparation import choose_expanded
from flowspec_edge.stage.quant.base import KINDS as QUANTISED
from flowspec_edge.stage.quant.base import LayerKind
from flowspec_edge.stage.quant.grouped import CudaLinear
from flowspec_edge.stage.quant.schemes import scheme
from flowspec_edge.stage.weights.load import fast_layout
from flowspec_edge.util.tensors import DTYPES

COMPARED_ROWS = 16  # rows at which kinds are compared: the paper's default for a segment
ROWS = (1, 4, 16, 32)
# Of a profile: PyTorch's kernel reads the weights once for every 16 rows, and many rows of a prompt expand them.
INT4_ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
SHAPE = (4096, 4096)
ROUNDS = 5
_COPY_BYTES = 256 * 1024**2

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class KindResult:
    """What was measured of a kind of weights.

    ``ms`` has milliseconds by rows and is empty if the kind does not work; ``nbytes`` counts weights with scales.
    """

    check: Finding
    ms: dict[int, float]
    nbytes: int


@dataclass(frozen=True)
class KernelReport:
    """The measured products of all kinds of weights.

    shape      (outputs, inputs)
    dtype      of 4-bit kinds' activations
    copy_rate  bytes read and written a second by a large copy
    """

    device: str
    name: str
    shape: tuple[int, int]
    rows: tuple[int, ...]
    dtype: str
    kinds: dict[str, KindResult]
    copy_rate: float
    capability: tuple[int, int] | None = None

    @property
    def compared_rows(self) -> int:
        """The number of rows at which kinds are compared: the nearest to 16."""
        return min(self.rows, key=lambda rows: abs(rows - COMPARED_ROWS))

    @property
    def fastest(self) -> LayerKind | None:
        """The fastest working 4-bit kind that is advisable for this GPU; None if there is none."""
        works = [kind for kind in QUANTISED if kind in self.kinds and self.kinds[kind].check.ok
                 and advisable(kind, self.capability)]
        return min(works, key=lambda kind: self.kinds[kind].ms[self.compared_rows], default=None)

    @property
    def unadvised(self) -> list[str]:
        return [kind for kind, result in self.kinds.items()
                if result.check.ok and not advisable(kind, self.capability)]

    def share(self, kind: str, rows: int) -> float | None:
        """Return the kind's read rate over the copy rate; None if not timed; on a CPU, caches distort it."""
        result = self.kinds[kind]
        return result.nbytes / (result.ms[rows] * 1e-3) / self.copy_rate if rows in result.ms else None

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the report, times in ms, rates in 10^9 bytes a second."""
        on_gpu = self.device == "cuda"
        return {
            "device": self.device, "name": self.name,
            "compute_capability": list(self.capability) if self.capability else None,
            "torch": torch.__version__, "dtype": self.dtype,
            "shape": list(self.shape), "rows": list(self.rows),
            "copy_gb_per_s": round(self.copy_rate / 1e9, 2),
            "kinds": {kind: {
                "works": result.check.ok, "why": result.check.found, "error": result.check.error,
                "bytes": result.nbytes, "ms": {str(rows): round(ms, 4) for rows, ms in result.ms.items()},
                **({"bandwidth_share": {str(rows): round(self.share(kind, rows) or 0.0, 3)
                                        for rows in result.ms}} if on_gpu else {}),
            } for kind, result in self.kinds.items()},
            "fastest": self.fastest, "judged_at_rows": self.compared_rows,
        }


def measure_kernels(device: str = "cpu", shape: tuple[int, int] = SHAPE, rows: Sequence[int] = ROWS,
                    dtype: str = "bf16", kinds: Sequence[str] = KINDS, rounds: int = ROUNDS) -> KernelReport:
    """Measure products with every kind of weights: the median of ``rounds``, after a warm-up round.

    Raise UsageError for a device that this machine does not have, or a matrix shape that no 4-bit kind takes.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device here; use --device cpu")
    rows = tuple(sorted(set(rows)))
    outputs, inputs = shape
    if not rows or rows[0] < 1 or outputs % 16 or inputs % 64 or min(shape) < 1:
        raise UsageError("give rows from 1 on, and a matrix of a multiple of 16 outputs by one of 64 inputs")
    results_of_kinds = compute([product(kind, kind, device, shape, rows, dtype) for kind in kinds])
    checks = [computed(results_of_kinds[kind]) for kind in kinds]
    products = {check.check: _product(check.check, shape, dtype, device) for check in checks if check.ok}
    clock = _Clock(device)
    times: dict[tuple[str, int], list[float]] = {(kind, n): [] for kind in products for n in rows}
    with torch.inference_mode():
        for again in range(rounds + 1):
            for n in rows:
                for kind, (multiply, _) in products.items():
                    x = torch.randn(n, inputs, device=device).to(activations(kind, dtype))
                    seconds = clock.time(partial(multiply, x))
                    if again:
                        times[kind, n].append(seconds)
    results = {check.check: KindResult(
        check, {n: 1e3 * statistics.median(times[check.check, n]) for n in rows} if check.ok else {},
        products[check.check][1] if check.ok else 0) for check in checks}
    return KernelReport(device, _name(device), (outputs, inputs), rows, dtype, results, clock.copy_rate,
                        torch.cuda.get_device_capability() if device == "cuda" else None)


def measure_int4(device: str, dtype: str, shape: tuple[int, int] = SHAPE) -> Int4Cost | None:
    """Measure products with int4 weights beside those with weights of ``dtype``; None if either kernel fails here."""
    report = measure_kernels(device, shape, INT4_ROWS, kinds=(dtype, "int4"))
    int4, full = (report.kinds[kind].ms for kind in ("int4", dtype))
    if not int4 or not full:
        return None
    rising = [[rounded(max(times[n] for n in report.rows if n <= rows)) for rows in report.rows]
              for times in (int4, full)]
    return Int4Cost(rows=[float(rows) for rows in report.rows], ms=rising[0], full_ms=rising[1])


def _product(kind: str, shape: tuple[int, int], dtype: str, device: str) -> tuple[Product, int]:
    rows, columns = shape
    if kind in DTYPES:
        weight = fast_layout(torch.full(shape, 0.01, dtype=DTYPES[kind], device=device))
        return partial(functional.linear, weight=weight), weight.numel() * weight.element_size()
    weight_scheme = scheme(next(k for k in QUANTISED if k == kind))
    linear = weight_scheme.linear(rows, columns, False, activations(kind, dtype), device)
    linear.fill({name: torch.randint(256, size, dtype=stored) if stored == torch.uint8
                 else torch.full(size, 0.01, dtype=stored)
                 for name, (size, stored) in weight_scheme.stored(rows, columns).items()})
    if isinstance(linear, CudaLinear):
        choose_expanded([linear])  # as a stage does
    return linear, linear.nbytes


class _Clock:
    """A clock for single products with cold caches.

    On a CPU the other kinds' products evict the weights; on a GPU a large copy does, which also hides the
    launch time of the product and its events.
    """

    def __init__(self, device: str) -> None:
        self._source = torch.ones(_COPY_BYTES if device == "cuda" else _COPY_BYTES // 4, dtype=torch.uint8,
                                  device=device)
        self._target = torch.empty_like(self._source)
        self._cuda = device == "cuda"
        copies = [self._measured(self._copy) for _ in range(ROUNDS)]
        self.copy_rate = 2 * self._source.numel() / min(copies)

    def time(self, work: Callable[[], object]) -> float:
        if self._cuda:
            self._copy()
        return self._measured(work)

    def _copy(self) -> None:
        self._target.copy_(self._source)

    def _measured(self, work: Callable[[], object]) -> float:
        if not self._cuda:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        work()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) * 1e-3


def _name(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
