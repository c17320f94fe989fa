"""The endpoint with the lowest versions of its libraries that pyproject.toml allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("starlette", "uvicorn", "h11", "pydantic", "prometheus-client")


def lowest() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = map(Requirement, project["dependencies"])
    return [f"{one.name}=={next(spec.version for spec in one.specifier if spec.operator == '>=')}"
            for one in wanted if one.name in LIBRARIES]


@pytest.mark.soak
def test_the_tests_of_the_endpoint_pass(tmp_path: Path) -> None:
    assert len(lowest()) == len(LIBRARIES)
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install",
                    "--target", str(tmp_path), *lowest()], check=True, timeout=600)
    paths = [str(tmp_path), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not soak", "-p", "no:cacheprovider", "tests/serving"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
