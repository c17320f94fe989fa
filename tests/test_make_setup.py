"""``make setup`` after an environment that was not completed, or whose Python has gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = Path(sys.base_prefix) / "bin" / "python3"
# Ubuntu's python3 without python3-venv: it makes the directory and its python, then fails at pip.
UBUNTU = f"""#!/bin/sh
case "$*" in "-m venv"*) [ -e venv-installed ] || {{ {PYTHON} -m venv --without-pip .venv; exit 1; }} ;; esac
exec {PYTHON} "$@"
"""


@pytest.mark.slow
def test_setup_completes_what_a_failed_venv_left(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "deploy/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    ubuntu = tmp_path / "ubuntu-python3"
    ubuntu.write_text(UBUNTU)
    ubuntu.chmod(0o755)
    python, ready = tmp_path / ".venv/bin/python", tmp_path / ".venv/.ready"

    def setup() -> str:
        """Without an index, so that it ends at the first package."""
        done = subprocess.run(["make", f"PYTHON={ubuntu}", "setup"], cwd=tmp_path, capture_output=True,
                              text=True, check=False, env={**os.environ, "PIP_NO_INDEX": "1"})
        assert done.returncode == 2
        return done.stderr

    assert "sudo apt install python3-venv, then make setup" in setup()
    assert python.exists()
    (tmp_path / "venv-installed").touch()
    assert "ERROR: " in (said := setup())  # pip's
    assert "torch" in said
    python.unlink()
    python.symlink_to("/nowhere/python3")
    ready.touch()
    assert "ERROR: " in (said := setup())
    assert "torch" in said
    assert not ready.exists()
