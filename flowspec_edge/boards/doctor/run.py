"""The doctor on one machine, and its harmless remedies: the clock, a power mode, groups.

On a board that has a release, `flowspec doctor --cluster` runs this file, which prints one line of JSON:
``python -m flowspec_edge.boards.doctor.run``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import zmq

from flowspec_edge.boards.commands import LocalRunner, Runner, as_root
from flowspec_edge.boards.probe.board import l4t_of, read_board
from flowspec_edge.boards.probe.checks import Subject, judge
from flowspec_edge.boards.probe.compute_rules import ComputeDevice, LibraryFacts
from flowspec_edge.boards.probe.facts import BoardFacts, SystemFacts, system_facts, torch_check_program
from flowspec_edge.boards.probe.findings import Finding, merged
from flowspec_edge.boards.probe.onboard.system import machine_facts, run_torch_check
from flowspec_edge.errors import FlowspecError
from flowspec_edge.util.interpreter import code_command

_EFFECTIVE_LATER = {"groups": "log in again, or restart the service: new groups count from then on"}


def check_machine(storage: Path | None = None, fix: bool = False) -> list[Finding]:
    """Check this machine; ``storage``: where shards will lie, None for the home directory."""
    directory = storage or Path.home()

    def ask() -> SystemFacts:
        return system_facts(machine_facts([str(directory)]))

    def judged(facts: SystemFacts) -> list[Finding]:
        absent = "" if directory.is_dir() else str(directory)
        return merged(judge("here", Subject(BoardFacts(system=facts), absent=absent)))

    facts = ask()
    findings = judged(facts)
    if fix:
        findings = apply_remedies(findings, lambda: judged(ask()))
    flowspec, *computed = check_release(l4t_of(facts))
    findings = [flowspec, *findings, *computed]
    return [replace(finding, fixed=bool(finding.fixed)) for finding in findings] if fix else findings


def apply_remedies(findings: Sequence[Finding], check: Callable[[], Sequence[Finding]],
                   runner: Runner | None = None) -> list[Finding]:
    """Run the remedies; return the findings afterwards, all with ``fixed``; ``check`` repeats the checks."""
    machine = runner or LocalRunner()
    errors = {finding.check: _run(finding, machine) for finding in findings if finding.remedy}
    now = {finding.check: finding for finding in check()} if "" in errors.values() else {}
    return [_after(finding, errors.get(finding.check), now.get(finding.check)) for finding in findings]


def _run(finding: Finding, runner: Runner) -> str:
    """Apply the finding's remedy; return why it failed, "" if it succeeded."""
    for command in finding.remedy:
        try:
            runner.run(as_root(command))
        except FlowspecError as error:
            return f"{shlex.join(command)}: {error}"
    return ""


def _after(finding: Finding, error: str | None, now: Finding | None) -> Finding:
    """Return the finding as a remedy has left it.

    error  None without a remedy, "" if it succeeded
    now    the check's finding afterwards
    """
    if error is None:
        return replace(finding, fixed=False)
    if error:
        return replace(finding, found=f"{finding.found}; could not be fixed: {error}", fixed=False)
    report = f"{finding.found}; done: {', then '.join(shlex.join(command) for command in finding.remedy)}"
    if finding.check in _EFFECTIVE_LATER:
        return replace(finding, state="ok", found=report, advice=_EFFECTIVE_LATER[finding.check], fixed=True)
    if now is None or now.remedy:
        return replace(finding, found=f"{report}, without effect", fixed=False)
    return replace(now, found=f"{report}; now: {now.found}", fixed=True)


def check_release(l4t: str) -> list[Finding]:
    """Check what only the release itself can tell; the first finding is "flowspec".

    l4t  "" for a machine that may lack a GPU

    Takes as long as several imports of torch.
    """
    torch_report = run_torch_check(code_command(torch_check_program("cuda")["program"]))
    torch = system_facts({"torch": torch_report}).torch
    libraries = LibraryFacts(version("flowspec-edge"), version("transformers"), zmq.zmq_version(),
                             zmq.has("curve"), torch)
    return merged(judge("release", ComputeDevice("cuda" if torch.cuda else "cpu", torch.cuda, l4t,
                                                 libraries=libraries)))


def main() -> None:
    """Print the findings of the release; the exit code is always 0."""
    print(json.dumps([finding.as_json() for finding in check_release(read_board().l4t)]))


if __name__ == "__main__":
    main()
