"""The wheel: built, installed elsewhere, and asked from a foreign directory for its data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ASK = """
import json, sys
import flowspec_edge.resources as r
from flowspec_edge.config import load_profile, profile_names
from flowspec_edge.modeldir import shipped_models
import flowspec_edge.serving as serving
from pathlib import Path
def files(root):
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
print(json.dumps({"file": r.__file__, "profiles": [load_profile(n).name for n in profile_names()],
                  "models": shipped_models(),
                  "page": files(Path(serving.__file__).parent / "page"),
                  "files": {k: files(r.resource_dir(k)) for k in r.KINDS}}))
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_wheel_finds_its_profiles_models_and_templates(tmp_path: Path) -> None:
    wheels, site, elsewhere = tmp_path / "wheels", tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT))
    run(*pip, *build, cwd=tmp_path)
    (wheel,) = wheels.glob("*.whl")
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
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
