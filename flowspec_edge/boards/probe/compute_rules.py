"""The rules on a release's libraries and on what a device computes; ``checks.CHECKS`` says who shows them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from flowspec_edge.boards.gpu_check.computations import Computation, ComputationResult
from flowspec_edge.boards.probe.facts import TorchFacts
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.boards.probe.software import judge_torch
from flowspec_edge.boards.probe.system_rules import large_pieces
from flowspec_edge.util.jetson import ORIN
from flowspec_edge.util.jetson import system as l4t_system

FULL = ("fp32", "fp16", "bf16")
BNB = ("nf4", "fp4")  # bitsandbytes'
IN_4_BITS = ("int4", *BNB)
# Of the largest result: a few roundings of the type that a result is rounded to.
TOLERANCE = {"fp32": 1e-4, "bf16": 2**-6, "fp16": 2**-8, "": 0.0}
_TRIED = ("int4", "nf4")  # by the doctor, beside full precision
_SHAPE = (1024, 1024)
_ROWS = (1, 16)
_PIECE_S = 60.0  # for a child that asks for pieces of memory
_MB = 10**6


@dataclass(frozen=True)
class LibraryFacts:
    """The versions that a release says of itself and of what it is installed with.

    zmq    ZeroMQ's; ``curve``: whether it can encrypt
    torch  as a process of its own imports it
    """

    flowspec: str
    transformers: str
    zmq: str
    curve: bool
    torch: TorchFacts


@dataclass(frozen=True)
class ComputeDevice:
    """A device of this machine that computes.

    name          torch's, such as "cuda:1"
    capability    (8, 7) for Orin; None for a CPU
    l4t           the machine's release of L4T, "" if it is no Jetson
    bitsandbytes  whether the package is installed
    memory        of the system, bytes by the names of /proc/meminfo
    available     bytes that the device can give at most; None for a CPU
    environment   of this process
    libraries     what the release has installed; None in `doctor --gpu`, which does not look at it
    results       by name, of the computations that the chosen checks ask for
    """

    name: str = "cpu"
    capability: tuple[int, int] | None = None
    l4t: str = ""
    bitsandbytes: bool = False
    memory: Mapping[str, int] = field(default_factory=dict)
    available: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    libraries: LibraryFacts | None = None
    results: Mapping[str, ComputationResult] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.name.startswith("cuda")


def computed(result: ComputationResult) -> Finding:
    """Judge whether a computation gave the right result, or any."""
    if result.fault:
        return Finding(result.name, "failed", result.fault)
    if result.error is None or result.error <= TOLERANCE[result.rounded]:
        return Finding(result.name, "ok", result.message, error=result.error)
    return Finding(result.name, "failed", f"results are wrong by {result.error:.2g} of the largest",
                   error=result.error if math.isfinite(result.error) else None)


def report_only(result: ComputationResult) -> Finding:
    """Report what a computation says; whether it works is for another check to judge."""
    finding = computed(result)
    return finding if finding.ok else replace(finding, state="skipped")


def advisable(kind: str, capability: tuple[int, int] | None) -> bool:
    """Return whether to shard models in ``kind`` for a GPU of this capability (None: CPU), if the kind works."""
    return kind not in BNB or capability != ORIN


# ---- the libraries of a release ------------------------------------------------------------------


def installed(device: ComputeDevice) -> Iterator[Finding]:
    if device.libraries:
        yield Finding("flowspec", "ok", device.libraries.flowspec)


def libraries(device: ComputeDevice) -> Iterator[Finding]:
    """Judge torch, transformers and the GPU that torch sees."""
    if device.libraries is None:
        return
    torch, l4t = device.libraries.torch, device.l4t
    yield Finding("torch", "ok", f"{torch.version}, transformers {device.libraries.transformers}")
    if torch.cuda:
        yield Finding("gpu", "ok", f"{torch.gpu}, CUDA {torch.built_for}")
    elif not l4t and not torch.why:
        yield Finding("gpu", "ok", "none: this machine computes on its CPU")
    yield from judge_torch(torch, sys.executable, l4t, "cuda" if l4t or torch.cuda else "cpu")


def encryption(device: ComputeDevice) -> Iterator[Finding]:
    if device.libraries is None:
        return
    zmq = device.libraries.zmq
    if device.libraries.curve:
        yield Finding("encryption", "ok", f"CURVE, ZeroMQ {zmq}")
    else:
        yield Finding("encryption", "failed", f"this ZeroMQ ({zmq}) has no CURVE",
                      "install pyzmq from its wheel: pip install --force-reinstall pyzmq")


# ---- products ------------------------------------------------------------------------------------


def product(name: str, kind: str, device: str, shape: Sequence[int], rows: Sequence[int], dtype: str
            ) -> Computation:
    """Return the computation of a product.

    The product is of ``rows`` rows with a matrix of ``shape`` (outputs, inputs).  ``dtype`` is the type of the
    activations of kinds in 4 bits.
    """
    return Computation(name, "flowspec_edge.boards.gpu_check.kernel_check:product", {
        "kind": kind, "device": device, "shape": list(shape), "rows": list(rows), "dtype": dtype})


def full_product(device: ComputeDevice) -> list[Computation]:
    return _products(device, (_full(device),))


def products_in_4_bits(device: ComputeDevice) -> list[Computation]:
    return _products(device, _TRIED)


def _full(device: ComputeDevice) -> str:
    return "fp16" if device.on_gpu else "fp32"


def _products(device: ComputeDevice, kinds: Sequence[str]) -> list[Computation]:
    if device.libraries and device.libraries.torch.why:
        return []  # there is no torch
    return [product(kind, kind, device.name, _SHAPE, _ROWS, _full(device)) for kind in kinds]


def right_product(device: ComputeDevice) -> Iterator[Finding]:
    """Judge whether the weights that need no library of their own multiply."""
    kind = _full(device)
    if kind not in device.results:
        return
    finding = computed(device.results[kind])
    if finding.ok:
        yield Finding("product", "ok", f"{kind} on {device.name}, right to {finding.error:.0e}")
    else:
        yield Finding("product", "failed", f"{kind} on {device.name}: {finding.found}",
                      "this torch does not fit this device: install another")


def in_4_bits(device: ComputeDevice) -> Iterator[Finding]:
    """Judge which weights in 4 bits multiply, and in which to shard models."""
    checked = [computed(device.results[kind]) for kind in _TRIED if kind in device.results]
    works = [summary.check for summary in checked if summary.ok]
    broken = [f"{summary.check} does not: {summary.found}" for summary in checked if not summary.ok]
    if checked and not broken:
        yield Finding("4 bits", "ok", f"{' and '.join(works)} work on {device.name}")
    if not broken:
        return
    advised = next((kind for kind in works if advisable(kind, device.capability)), "fp16")
    summary = "; ".join([*(f"{kind} works" for kind in works), *broken])
    advice = f"shard models in {advised}"
    if "nf4" in works and not advisable("nf4", device.capability):
        advice += ": on this GPU bitsandbytes expands the whole matrix for every product of more than 4 rows"
    elif advised == "int4":
        advice += ", which needs no bitsandbytes"
    if "nf4" not in works and advisable("nf4", device.capability):
        advice += f", or {_build(device.capability)}"
    yield Finding("4 bits", "warning", summary, advice)


def _build(capability: tuple[int, int] | None) -> str:
    if capability is None:
        return "install bitsandbytes 0.49 or newer"
    return ("build bitsandbytes for this GPU: cmake -DCOMPUTE_BACKEND=cuda "
            f"-DCOMPUTE_CAPABILITY={capability[0]}{capability[1]}")


def advised_product(device: ComputeDevice, result: ComputationResult, kind: str) -> Finding:
    """Judge a product as ``computed`` does; a kind that works and is not advisable says so."""
    finding = computed(result)
    if not finding.ok or advisable(kind, device.capability):
        return finding
    return replace(finding, found="right, but above 4 rows the whole matrix is expanded for every product: shard in "
                                "int4")


def without_bitsandbytes(device: ComputeDevice) -> Iterator[Finding]:
    if not device.bitsandbytes:
        yield from (Finding(kind, "skipped", "bitsandbytes is not installed: only models that were sharded in "
                                             f"{kind} need it") for kind in BNB)


# ---- memory --------------------------------------------------------------------------------------


def free_memory(device: ComputeDevice) -> Finding:
    """Report MemFree beside MemAvailable: CUDA on a Jetson is reported not to get all that the page cache holds."""
    if not {"MemFree", "MemAvailable"} <= device.memory.keys():
        return Finding("free memory", "unknown", "the system does not say")
    free, available = (device.memory[name] / 1e6 for name in ("MemFree", "MemAvailable"))
    amounts = f"MemFree {free:,.0f} MB, MemAvailable {available:,.0f} MB"
    if free < available / 2:
        amounts += (": the difference is page cache, which CUDA may not get where it shares this memory; sync; "
                    "echo 3 | sudo tee /proc/sys/vm/drop_caches returns it")
    return Finding("free memory", "ok", amounts)


def pieces(device: ComputeDevice) -> list[Computation]:
    """Ask for what is available and its halves, in a process where nothing else was computed."""
    return [Computation(str(mb), "flowspec_edge.boards.gpu_check.gpu_facts:piece", {"device": device.name, "mb": mb},
                        _PIECE_S) for mb in _halves(device.available or 0)]


def largest_piece(device: ComputeDevice) -> Iterator[Finding]:
    """Report the largest of the pieces that the device gave."""
    needed_mb = l4t_system().large_pieces.needed_mb
    if device.available is None:
        return
    allocations = [device.results[str(mb)] for mb in _halves(device.available)]
    if not allocations:
        yield Finding("largest piece", "warning",
                      f"only {device.available // _MB} MB are available: stop what else runs here, and try again")
        return
    first_allowed = next((index for index, result in enumerate(allocations) if not result.fault), len(allocations))
    refused = allocations[first_allowed - 1].fault if first_allowed else ""
    if first_allowed == len(allocations):
        yield Finding("largest piece", "failed", f"not even {needed_mb} MB at once, which models need: {refused}")
        return
    beyond = f"; {int(allocations[first_allowed - 1].name):,} MB: {refused}" if first_allowed else ", all that is free"
    yield Finding("largest piece", "ok", f"{int(allocations[first_allowed].name):,} MB at once{beyond}")


def _halves(available: int) -> list[int]:
    """Return ``available`` bytes in MB, its halves, and what models need; none if there is less than that."""
    needed_mb = l4t_system().large_pieces.needed_mb
    if available < needed_mb * _MB:
        return []
    return [*takewhile(lambda mb: mb > needed_mb, (available // _MB >> times for times in range(64))), needed_mb]


def refusing_release(device: ComputeDevice) -> Iterator[Finding]:
    """Judge the release as ``large_pieces`` does, in one sentence, because this report has no advice."""
    yield from (replace(finding, found=f"{finding.found}; {finding.advice}") for finding in large_pieces(device.l4t))


def allocator(device: ComputeDevice) -> Iterator[Finding]:
    """Judge whether PyTorch's allocator is set up in a way that fails on a Jetson."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if device.l4t and "expandable_segments:true" in device.environment.get(name, "").replace(" ", "").lower():
            yield Finding("allocator", "failed", f"{name} has expandable_segments, with which PyTorch is "
                                                 "reported to fail on a Jetson: take it out")
