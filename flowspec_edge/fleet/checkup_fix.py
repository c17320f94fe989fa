"""What a check-up found and can be put right without harm: the clock, a power mode, groups.

Knows how remedies are carried out, as root or by sudo, and what is said of that.  Does not know what they
are (``checkup``).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.checkup import Finding
from flowspec_edge.fleet.commands import LocalRunner, as_root

_LATER = {"groups": "log in again: groups count from then on"}


def mend(findings: Sequence[Finding], again: Callable[[], Sequence[Finding]]) -> list[Finding]:
    """Run the remedies of ``findings`` on this machine; the findings afterwards, all with ``fixed``.

    again  looks once more, after something was done
    """
    outcome = {finding.check: _run(finding) for finding in findings if finding.remedy}
    now = {finding.check: finding for finding in again()} if "" in outcome.values() else {}
    return [_told(finding, outcome.get(finding.check), now.get(finding.check)) for finding in findings]


def _run(finding: Finding) -> str:
    """Why it could not be done; "" if it was."""
    for command in finding.remedy:
        try:
            LocalRunner().run(as_root(command))
        except FlowspecError as error:
            return f"{shlex.join(command)}: {error}"
    return ""


def _told(finding: Finding, why: str | None, now: Finding | None) -> Finding:
    if why is None:
        return replace(finding, fixed=False)
    if why:
        return replace(finding, found=f"{finding.found}; could not be put right: {why}", fixed=False)
    done = f"{finding.found}; done: {', then '.join(shlex.join(command) for command in finding.remedy)}"
    if finding.check in _LATER:
        return replace(finding, state="ok", found=done, advice=_LATER[finding.check], fixed=True)
    if now is None or now.check != finding.check or now.remedy:
        return replace(finding, found=f"{done}, and it is as before", fixed=False)
    return replace(now, found=f"{done}; now: {now.found}", fixed=True)
