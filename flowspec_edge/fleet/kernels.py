"""Which kind of weights a device multiplies by fastest: full ones, bitsandbytes' 4 bits, grouped int4.

What a board's doctor runs once, so that a model is cut for what its boards are good at.  Every kind first
shows in a process of its own that it works (``kernel_trial``); what works is timed here, all kinds in turn,
so that whatever slows the device down slows them alike.  Does not know models.
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

from flowspec_edge.errors import UsageError
from flowspec_edge.fleet.kernel_trial import KINDS, Trial, Wish, activations, advisable, try_kinds
from flowspec_edge.stage.filling import laid_out
from flowspec_edge.stage.quant import KINDS as QUANTISED
from flowspec_edge.stage.quant import Kind, scheme
from flowspec_edge.tensors import DTYPES

JUDGED_AT = 16  # rows of a segment, the paper's default: the fastest there is the fastest
ROWS = (1, 4, 16, 32)
SHAPE = (4096, 4096)
ROUNDS = 5
_COPY_BYTES = 256 * 1024**2

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class KindResult:
    """A kind's trial and its times: milliseconds of a product, by rows; none where it does not work.

    nbytes   of its weights, scales included
    """

    trial: Trial
    ms: dict[int, float]
    nbytes: int


@dataclass(frozen=True)
class KernelReport:
    """What was found on one device.

    shape       (outputs, inputs) of the matrix
    dtype       of the activations that 4-bit kinds take
    kinds       in the order of ``kernel_trial.KINDS``
    copy_rate   bytes read and written a second by a large copy
    capability  of a GPU, its compute capability: (8, 7) is Orin's
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
    def judged_at(self) -> int:
        """The number of rows at which kinds are compared: 16, or what is nearest to it."""
        return min(self.rows, key=lambda rows: abs(rows - JUDGED_AT))

    @property
    def fastest(self) -> Kind | None:
        """The 4-bit kind that takes least of those to be advised here; None if none of them works."""
        works = [kind for kind in QUANTISED if kind in self.kinds and self.kinds[kind].trial.works
                 and advisable(kind, self.capability)]
        return min(works, key=lambda kind: self.kinds[kind].ms[self.judged_at], default=None)

    @property
    def unadvised(self) -> list[str]:
        """4-bit kinds that work here, and that models are still not to be sharded in for this GPU."""
        return [kind for kind, found in self.kinds.items()
                if found.trial.works and not advisable(kind, self.capability)]

    def share(self, kind: str, rows: int) -> float | None:
        """Of the copy rate, how fast the kind's weights were read; None where it was not timed.

        Means little on a CPU, whose caches hold what was used last."""
        found = self.kinds[kind]
        return found.nbytes / (found.ms[rows] * 1e-3) / self.copy_rate if rows in found.ms else None

    def as_json(self) -> dict[str, Any]:
        """What is written to a file: times in ms, rates in 10^9 bytes a second; on a GPU also the share of
        the copy rate that each product reads its weights with."""
        on_gpu = self.device == "cuda"
        return {
            "device": self.device, "name": self.name,
            "compute_capability": list(self.capability) if self.capability else None,
            "torch": torch.__version__, "dtype": self.dtype,
            "shape": list(self.shape), "rows": list(self.rows),
            "copy_gb_per_s": round(self.copy_rate / 1e9, 2),
            "kinds": {kind: {
                "works": found.trial.works, "why": found.trial.why, "error": found.trial.error,
                "bytes": found.nbytes, "ms": {str(rows): round(ms, 4) for rows, ms in found.ms.items()},
                **({"bandwidth_share": {str(rows): round(self.share(kind, rows) or 0.0, 3)
                                        for rows in found.ms}} if on_gpu else {}),
            } for kind, found in self.kinds.items()},
            "fastest": self.fastest, "judged_at_rows": self.judged_at,
        }


def measure_kernels(device: str = "cpu", shape: tuple[int, int] = SHAPE, rows: Sequence[int] = ROWS,
                    dtype: str = "bf16", kinds: Sequence[str] = KINDS, rounds: int = ROUNDS) -> KernelReport:
    """Try and time every kind.

    rounds  timed after one that is not; the median counts

    UsageError for a device that is not there, or a matrix that no 4-bit kind takes.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device here; use --device cpu")
    rows = tuple(sorted(set(rows)))
    outputs, inputs = shape
    if not rows or rows[0] < 1 or outputs % 16 or inputs % 64 or min(shape) < 1:
        raise UsageError("give rows from 1 on, and a matrix of a multiple of 16 outputs by one of 64 inputs")
    trials = try_kinds(Wish(tuple(kinds), device, (outputs, inputs), rows, dtype))
    products = {trial.kind: _product(trial.kind, shape, dtype, device) for trial in trials if trial.works}
    clock = _Clock(device)
    times: dict[tuple[str, int], list[float]] = {(kind, n): [] for kind in products for n in rows}
    with torch.inference_mode():
        for again in range(rounds + 1):
            for n in rows:
                for kind, (product, _) in products.items():
                    x = torch.randn(n, inputs, device=device).to(activations(kind, dtype))
                    seconds = clock.time(partial(product, x))
                    if again:
                        times[kind, n].append(seconds)
    found = {trial.kind: KindResult(
        trial, {n: 1e3 * statistics.median(times[trial.kind, n]) for n in rows} if trial.works else {},
        products[trial.kind][1] if trial.works else 0) for trial in trials}
    return KernelReport(device, _name(device), (outputs, inputs), rows, dtype, found, clock.copy_rate,
                        torch.cuda.get_device_capability() if device == "cuda" else None)


def _product(kind: str, shape: tuple[int, int], dtype: str, device: str) -> tuple[Product, int]:
    """A product by a matrix of this kind, and the matrix's bytes; the numbers in it do not matter."""
    rows, columns = shape
    if kind in DTYPES:
        weight = laid_out(torch.full(shape, 0.01, dtype=DTYPES[kind], device=device))
        return partial(functional.linear, weight=weight), weight.numel() * weight.element_size()
    chosen = scheme(next(k for k in QUANTISED if k == kind))
    linear = chosen.linear(rows, columns, False, activations(kind, dtype), device)
    linear.fill({name: torch.randint(256, size, dtype=stored) if stored == torch.uint8
                 else torch.full(size, 0.01, dtype=stored)
                 for name, (size, stored) in chosen.stored(rows, columns).items()})
    return linear, linear.nbytes


class _Clock:
    """Times single products whose weights are not in a cache.

    On a CPU the other kinds' products, between two of the same kind, have put other weights there.  On a
    GPU a large copy goes first: it empties the cache, and while it runs the host sends the product and the
    events around it, so that sending is not in the time.
    """

    def __init__(self, device: str) -> None:
        self._source = torch.ones(_COPY_BYTES if device == "cuda" else _COPY_BYTES // 4, dtype=torch.uint8,
                                  device=device)
        self._target = torch.empty_like(self._source)
        self._cuda = device == "cuda"
        copies = [self._measured(self._copy) for _ in range(ROUNDS)]
        self.copy_rate = 2 * self._source.numel() / min(copies)

    def time(self, work: Callable[[], object]) -> float:
        """Seconds that ``work`` takes."""
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
    """What computes: the GPU's name, or which instructions PyTorch uses on the CPU."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
