"""Remedies that are really run, and the findings afterwards."""

from __future__ import annotations

import shlex
from pathlib import Path

from flowspec_edge.boards.doctor.run import apply_remedies
from flowspec_edge.boards.probe.findings import Finding


def test_remedies_that_help_and_remedies_that_fail(tmp_path: Path) -> None:
    mended, broken, unmoved = tmp_path / "mended", tmp_path / "no/such/directory", tmp_path / "unmoved"

    def look() -> list[Finding]:
        return [
            Finding("fine", "ok", "as it should be"),
            Finding("sad", "failed", "nothing helps", "buy another"),
            Finding("file", "ok", "there") if mended.exists() else
            Finding("file", "warning", "absent", "touch it", (("true",), ("touch", str(mended)))),
            Finding("place", "warning", "absent", "make it",
                    (("touch", str(broken)), ("touch", str(unmoved)))),
            Finding("always", "warning", "so", "try", (("true",),)),
            Finding("groups", "failed", "not in video", "add", (("true",),)),
        ]

    fine, sad, file, place, always, groups = apply_remedies(look(), look)
    assert fine == Finding("fine", "ok", "as it should be", fixed=False)
    assert sad == Finding("sad", "failed", "nothing helps", "buy another", fixed=False)
    done = shlex.join(["touch", str(mended)])
    assert (file.state, file.found, file.advice) == ("ok", f"absent; done: true, then {done}; now: there", "")
    assert file.as_json()["fixed"] is True
    assert (place.state, place.advice, place.fixed) == ("warning", "make it", False)
    assert place.found == (f"absent; could not be fixed: touch {broken}: this machine: touch: cannot "
                           f"touch '{broken}': No such file or directory")
    assert not unmoved.exists()  # what comes after a command that fails is not run
    assert (always.found, always.fixed) == ("so; done: true, without effect", False)
    assert (groups.state, groups.advice, groups.fixed) == (
        "ok", "log in again, or restart the service: new groups count from then on", True)
