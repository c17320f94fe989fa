"""Remedies carried out for real, and what is said of those that cannot be."""

from __future__ import annotations

import shlex
from pathlib import Path

from flowspec_edge.fleet.checkup import Finding
from flowspec_edge.fleet.checkup_fix import mend


def test_what_is_done_and_what_cannot_be(tmp_path: Path) -> None:
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

    fine, sad, file, place, always, groups = mend(look(), look)
    assert fine == Finding("fine", "ok", "as it should be", fixed=False)
    assert sad == Finding("sad", "failed", "nothing helps", "buy another", fixed=False)
    done = shlex.join(["touch", str(mended)])
    assert (file.state, file.found, file.advice) == ("ok", f"absent; done: true, then {done}; now: there", "")
    assert file.as_json()["fixed"] is True
    assert (place.state, place.advice, place.fixed) == ("warning", "make it", False)
    assert place.found == (f"absent; could not be put right: touch {broken}: this machine: touch: cannot "
                           f"touch '{broken}': No such file or directory")
    assert not unmoved.exists()  # what comes after a command that fails is not run
    assert (always.found, always.fixed) == ("so; done: true, and it is as before", False)
    assert (groups.state, groups.advice, groups.fixed) == (
        "ok", "log in again: groups count from then on", True)


def test_nothing_is_said_of_fixing_when_nobody_asked() -> None:
    assert "fixed" not in Finding("file", "warning", "absent", "touch it", (("touch", "x"),)).as_json()
