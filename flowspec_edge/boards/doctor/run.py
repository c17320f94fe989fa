"""The doctor on one machine, and its harmless remedies: the clock, a power mode, groups.

On a board that has a release, `flowspec doctor --cluster` runs this file, which prints one line of JSON:
``python -m flowspec_edge.boards.doctor.run``.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from flowspec_edge.boards.commands import LocalRunner, Runner, as_root
from flowspec_edge.boards.probe.board import l4t_of, read_board
from flowspec_edge.boards.probe.checks import Subject, judge
from flowspec_edge.boards.probe.facts import (
    BoardFacts,
    SystemFacts,
    TorchFacts,
    system_facts,
    torch_check_program,
)
from flowspec_edge.boards.probe.findings import Finding, merged
from flowspec_edge.boards.probe.onboard.system import machine_facts, run_torch_check
from flowspec_edge.boards.probe.software import judge_torch
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.interpreter import code_command

_SHAPE = (1024, 1024)
_ROWS = (1, 16)
_4_BIT = ("int4", "nf4")
_EFFECTIVE_LATER = {"groups": "log in again, or restart the service: new groups count from then on"}


def check_machine(storage: Path | None = None, fix: bool = False) -> list[Finding]:
    """``storage``: where shards will lie; None for the home directory."""
    where = storage or Path.home()

    def ask() -> SystemFacts:
        return system_facts(machine_facts([str(where)]))

    def judged(facts: SystemFacts) -> list[Finding]:
        missing = Finding("disk", "failed", f"{where}: No such directory", "name a directory that exists")
        return [missing if finding.check == "disk" and not where.is_dir() else finding
                for finding in merged(judge("here", Subject(BoardFacts(system=facts))))]

    facts = ask()
    found = judged(facts)
    if fix:
        found = apply_remedies(found, lambda: judged(ask()))
    found = [_installed(), *found, *check_compute(l4t_of(facts))]
    return [replace(finding, fixed=bool(finding.fixed)) for finding in found] if fix else found


def apply_remedies(findings: Sequence[Finding], check: Callable[[], Sequence[Finding]],
                   runner: Runner | None = None) -> list[Finding]:
    """Run the remedies; return the findings afterwards, all with ``fixed``; ``check`` repeats the checks."""
    where = runner or LocalRunner()
    errors = {finding.check: _run(finding, where) for finding in findings if finding.remedy}
    now = {finding.check: finding for finding in check()} if "" in errors.values() else {}
    return [_after(finding, errors.get(finding.check), now.get(finding.check)) for finding in findings]


def _run(finding: Finding, runner: Runner) -> str:
    """Why the remedy failed; "" if it succeeded."""
    for command in finding.remedy:
        try:
            runner.run(as_root(command))
        except FlowspecError as error:
            return f"{shlex.join(command)}: {error}"
    return ""


def _after(finding: Finding, error: str | None, now: Finding | None) -> Finding:
    """``error``: None without a remedy, "" if it succeeded; ``now``: the check's finding afterwards."""
    if error is None:
        return replace(finding, fixed=False)
    if error:
        return replace(finding, found=f"{finding.found}; could not be fixed: {error}", fixed=False)
    done = f"{finding.found}; done: {', then '.join(shlex.join(command) for command in finding.remedy)}"
    if finding.check in _EFFECTIVE_LATER:
        return replace(finding, state="ok", found=done, advice=_EFFECTIVE_LATER[finding.check], fixed=True)
    if now is None or now.remedy:
        return replace(finding, found=f"{done}, without effect", fixed=False)
    return replace(now, found=f"{done}; now: {now.found}", fixed=True)


def _installed() -> Finding:
    return Finding("flowspec", "ok", version("flowspec-edge"))


def check_compute(l4t: str) -> list[Finding]:
    """Takes as long as several imports of torch; ``l4t`` is "" for a machine that may lack a GPU."""
    told = run_torch_check(code_command(torch_check_program("cuda")["program"]))
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
    from flowspec_edge.boards.gpu_check.kernel_check import check_products

    device, full = ("cuda", "fp16") if on_gpu else ("cpu", "fp32")
    return check_products((full, *_4_BIT), device, _SHAPE, _ROWS, full)


def judge_products(products: Sequence[Finding], capability: tuple[int, int] | None) -> list[Finding]:
    """``products``: full precision first; ``capability``: of the GPU, None for a CPU."""
    from flowspec_edge.boards.gpu_check.kernel_check import advisable

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


def main() -> None:
    """Print the findings that only the release itself can make; the exit code is always 0."""
    findings = [_installed(), *check_compute(read_board().l4t)]
    print(json.dumps([finding.as_json() for finding in findings]))


if __name__ == "__main__":
    main()
