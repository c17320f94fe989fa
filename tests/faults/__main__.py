"""Plant each fault of faults.toml in a copy of the sources, and run the tests that must catch it.

    python -m tests.faults [WORD ...]    # the faults whose names contain one of the words; all by default

Prints the first test that fails with each fault; exits with 1 if a fault is missed. The working tree is never
changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
_CAUGHT = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_PASSED, _FAILED = 0, 1  # exit codes of pytest; every other one says that it ran no test to its end
_IN_ORDINARY_RUNS = "not slow and not soak and not fleet and not aarch64 and not strict"


@dataclass(frozen=True)
class Fault:
    """In ``path``, the one occurrence of ``old`` becomes ``new``."""

    name: str
    path: str
    old: str
    new: str
    tests: list[str]

    def planted(self, source: str) -> str:
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.path} has its text {count} times")
        return source.replace(self.old, self.new)


def faults() -> list[Fault]:
    table = tomllib.loads((Path(__file__).parent / "faults.toml").read_text())
    return [Fault(**one) for one in table["fault"]]


def copied(to: Path) -> None:
    """The files that git knows or would add."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def caught_by(fault: Fault, copy: Path) -> str | None:
    """Return the first test of ``copy`` that fails with the fault; SystemExit if pytest could not run them."""
    path = copy / fault.path
    source = path.read_text()
    path.write_text(fault.planted(source))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "--hypothesis-profile", "unshrunk", "-m",
             _IN_ORDINARY_RUNS, *fault.tests], cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False)
    finally:
        path.write_text(source)
    if done.returncode == _PASSED:
        return None
    found = _CAUGHT.search(done.stdout)
    if done.returncode != _FAILED or found is None:
        raise SystemExit(f"{fault.name}: pytest exits with {done.returncode}:\n{done.stdout}{done.stderr}")
    return found[1]


def main(words: list[str]) -> int:
    chosen = [fault for fault in faults() if not words or any(word in fault.name for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        copied(Path(directory))
        for fault in chosen:
            caught = caught_by(fault, Path(directory))
            missed += caught is None
            print(f"{fault.name}: {caught or 'MISSED'}", flush=True)
    print(f"{len(chosen)} faults, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
