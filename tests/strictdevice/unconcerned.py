"""Ask whether a change leaves out `make test-strict`: exits with 0 if nothing has changed that those tests protect.

    python tests/strictdevice/unconcerned.py    # in the work tree; one line says what is compared, and the outcome

They protect what computes: layers, drafting and sampling, every other Python file that imports torch, before the change
or after it, the strict device itself, and what decides which tests run on which libraries.

The work tree is compared with the commit at which its branch left main.  On main itself, whose last run is not known,
and where no main is found, it is compared with the commit RECENT commits back.  Where neither is in the history, as in
a shallow clone, the tests must run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

RECENT = 50  # more than come to main between two runs
ALWAYS = ("flowspec_edge/stage/", "flowspec_edge/drafting/", "flowspec_edge/sampling/", "tests/strictdevice/",
          "deploy/constraints.txt", "pyproject.toml", "Makefile", ".ci/")
# With the kit that gives tests their devices.  mypy is strict: what handles a tensor imports its type.
TENSORS = re.compile(r"^\s*(import|from) (torch\b|kits\.torch_devices\b|strictdevice\b)", re.MULTILINE)


def git(tree: Path, *arguments: str) -> str | None:
    """Return what git prints; None if it fails."""
    done = subprocess.run(["git", "-c", "core.quotePath=false", *arguments], cwd=tree, capture_output=True, check=False)
    return None if done.returncode else done.stdout.decode(errors="replace")


def base(tree: Path) -> str | None:
    """Return the commit with which ``tree`` is compared; None if there is none."""
    head = git(tree, "rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        left = git(tree, "merge-base", "HEAD", main)
        if left and left != head:
            return left.strip()
        if left:
            break  # this is main
    back = git(tree, "rev-parse", "--verify", "--quiet", f"HEAD~{RECENT}")
    return back.strip() if back else None


def protected(tree: Path, commit: str, path: str) -> bool:
    if path.startswith(ALWAYS):
        return True
    if not path.endswith(".py"):
        return False
    file = tree / path
    now = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    before = git(tree, "show", f"{commit}:{path}") or ""
    return any(TENSORS.search(text) for text in (now, before))


def judged(tree: Path) -> tuple[bool, str]:
    """Return whether the tests may be left out, and one line that says why."""
    commit = base(tree)
    if commit is None:
        return False, "make test-strict runs: the history here does not say what has changed"
    listed = [git(tree, "diff", "--name-only", "--no-renames", commit),
              git(tree, "ls-files", "--others", "--exclude-standard")]
    if None in listed:
        return False, "make test-strict runs: git cannot say what has changed"
    changed = sorted({path for part in listed for path in (part or "").splitlines()})
    found = [path for path in changed if protected(tree, commit, path)]
    since = f"since {commit[:10]}"
    if not found:
        return True, (f"make test-strict is left out: none of the {len(changed)} files changed {since} computes on "
                      "a device; the nightly run has it")
    more = f" and {len(found) - 1} more" if found[1:] else ""
    return False, f"make test-strict runs: {found[0]}{more} changed {since}"


def main() -> int:
    left_out, why = judged(Path.cwd())
    print(why)
    return 0 if left_out else 1


if __name__ == "__main__":
    sys.exit(main())
