"""The wheel: built, installed elsewhere, and asked from a foreign directory for its data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from flowspec_edge.boards.deploy.wheels import build_wheel, rebuild
from flowspec_edge.model.draft_kinds import ENTRY_POINTS as DRAFT_KINDS
from flowspec_edge.strategies.registry import ENTRY_POINTS as STRATEGIES

ROOT = Path(__file__).resolve().parent.parent
ASK = """
import json, sys
import flowspec_edge.util.resources as r
from flowspec_edge.device_profile import load_profile, profile_names
from flowspec_edge.model.opened import shipped_models
import flowspec_edge.serving as serving
from pathlib import Path
def files(root):
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*")
                  if p.is_file() and p.suffix != ".pyc"  # which an installer adds
                  and p.relative_to(root).parts[0] != "recipe")  # of the source tree alone
print(json.dumps({"file": r.__file__, "profiles": [load_profile(n).name for n in profile_names()],
                  "models": shipped_models(),
                  "page": files(Path(serving.__file__).parent / "dashboard" / "page"),
                  "files": {k: files(r.resource_dir(k)) for k in r.KINDS}}))
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """Where that wheel is installed."""
    site = wheel.parent / "site"
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps",
        "--no-index", "--target", str(site), str(wheel), cwd=wheel.parent)
    return site


@pytest.mark.slow
def test_the_same_tree_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "flowspec_edge-0.0.9-py3-none-any.whl").write_text("the one before")
    again = build_wheel(tmp_path)
    assert [*tmp_path.iterdir()] == [again]
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


@pytest.mark.slow
def test_an_installation_makes_the_wheel_that_it_came_from(wheel: Path, site: Path, tmp_path: Path) -> None:
    (info,) = site.glob("*.dist-info")
    again = rebuild(PathDistribution(info), tmp_path)
    assert again.name == wheel.name
    record = f"{info.name}/RECORD"
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        assert all(one.read(name) == other.read(name) for name in one.namelist() if name != record)
        assert sorted(one.read(record).split()) == sorted(other.read(record).split())


@pytest.mark.slow
def test_an_installed_wheel_finds_its_data(site: Path, tmp_path: Path) -> None:
    (info,) = site.glob("*.dist-info")  # by which a board finds what comes by entry points
    assert {found.group for found in PathDistribution(info).entry_points} >= {STRATEGIES, DRAFT_KINDS}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = json.loads(run(sys.executable, "-c", ASK, cwd=elsewhere, PYTHONPATH=str(site)))
    assert Path(found["file"]).is_relative_to(site)
    here = json.loads(run(sys.executable, "-c", ASK, cwd=ROOT, PYTHONPATH=str(ROOT)))
    assert Path(here["file"]).is_relative_to(ROOT)
    assert {k: found[k] for k in ("profiles", "models", "files", "page")} == \
           {k: here[k] for k in ("profiles", "models", "files", "page")}
    assert "paper-7b" in found["profiles"]
    assert {"index.html", "main.js", "style.css"} <= set(found["page"])
    script = run(str(site / "bin" / "flowspec"), "profiles", cwd=elsewhere, PYTHONPATH=str(site))
    assert "paper-7b" in script
