"""pytest on the strict device, child processes too: ``python tests/strictdevice [ARGUMENTS OF PYTEST]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> None:
    sys.path[0] = str(HERE.parent)
    from strictdevice import build

    if why_not := build.why_not():
        # As with other tests, CI has what they need, and sets FLOWSPEC_ALL_TESTS.
        print(f"tests on the strict device are left out: {why_not}", file=sys.stderr)
        sys.exit(bool(os.environ.get("FLOWSPEC_ALL_TESTS")))
    build.extension()
    path = [str(HERE / "site"), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
