"""The doctor's checks that compute, in child processes: a library built for other hardware may crash."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version

from flowspec_edge.fleet.probe.facts import TorchFacts, system_facts, torch_check_program
from flowspec_edge.fleet.probe.findings import Finding, merged
from flowspec_edge.fleet.probe.onboard.system import run_torch_check
from flowspec_edge.fleet.probe.software import judge_torch

_SHAPE = (1024, 1024)
_ROWS = (1, 16)
_4_BIT = ("int4", "nf4")


def check_compute(l4t: str) -> list[Finding]:
    """Takes as long as several imports of torch; ``l4t`` is "" for a machine that may lack a GPU."""
    told = run_torch_check([sys.executable, "-c", torch_check_program("cuda")["program"]])
    torch = system_facts({"torch": told}).torch
    findings = judge_libraries(torch, l4t)
    if not torch.why:
        findings += judge_products(_products(bool(torch.cuda)), torch.cuda)
    return [*findings, _encryption()]


def judge_libraries(torch: TorchFacts, l4t: str) -> list[Finding]:
    found = [Finding("torch", "ok", f"{torch.version}, transformers {version('transformers')}")]
    if torch.cuda:
        found.append(Finding("gpu", "ok", f"{torch.gpu}, CUDA {torch.built_for}"))
    elif not l4t and not torch.why:
        found.append(Finding("gpu", "ok", "none: this machine computes on its CPU"))
    device = "cuda" if l4t or torch.cuda else "cpu"
    return merged([*found, *judge_torch(torch, sys.executable, l4t, device)])


def _products(on_gpu: bool) -> list[Finding]:
    """A product in full precision, then one in 4 bits, each compared with float64."""
    from flowspec_edge.fleet.gpu_check.kernel_check import ProductCheck, check_products

    device, full = ("cuda", "fp16") if on_gpu else ("cpu", "fp32")
    return check_products(ProductCheck((full, *_4_BIT), device, _SHAPE, _ROWS, full))


def judge_products(products: Sequence[Finding], capability: tuple[int, int] | None) -> list[Finding]:
    """``products``: full precision first; ``capability``: of the GPU, None for a CPU."""
    from flowspec_edge.fleet.gpu_check.kernel_check import advisable

    full, device = products[0], "cpu" if capability is None else "cuda"
    findings = [Finding("product", "ok", f"{full.check} on {device}, right to {full.error:.0e}")
                if full.ok else
                Finding("product", "failed", f"{full.check} on {device}: {full.found}",
                        "this torch does not fit this device: install another")]
    works = [product.check for product in products[1:] if product.ok]
    broken = [f"{product.check} does not: {product.found}" for product in products[1:] if not product.ok]
    advised = next((kind for kind in works if advisable(kind, capability)), "fp16")
    if not broken:
        return [*findings, Finding("4 bits", "ok", f"{' and '.join(works)} work on {device}")]
    found = "; ".join([*(f"{kind} works" for kind in works), *broken])
    advice = f"shard models in {advised}"
    if "nf4" in works and not advisable("nf4", capability):
        advice += ": on this GPU bitsandbytes expands the whole matrix for every product of more than 4 rows"
    elif advised == "int4":
        advice += ", which needs no bitsandbytes"
    if "nf4" not in works and advisable("nf4", capability):
        advice += f", or {_build(capability)}"
    return [*findings, Finding("4 bits", "warning", found, advice)]


def _build(capability: tuple[int, int] | None) -> str:
    if capability is None:
        return "install bitsandbytes 0.49 or newer"
    return ("build bitsandbytes for this GPU: cmake -DCOMPUTE_BACKEND=cuda "
            f"-DCOMPUTE_CAPABILITY={capability[0]}{capability[1]}")


def _encryption() -> Finding:
    import zmq

    if zmq.has("curve"):
        return Finding("encryption", "ok", f"CURVE, ZeroMQ {zmq.zmq_version()}")
    return Finding("encryption", "failed", f"this ZeroMQ ({zmq.zmq_version()}) has no CURVE",
                   "install pyzmq from its wheel: pip install --force-reinstall pyzmq")
