"""A release from a tag: what is in it, and which tags are refused."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def release(sources: Path, tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, sources / ".ci" / "release", tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy that a test may change; of models what a wheel takes by name, without their weights."""
    copy = tmp_path / "sources"
    copy.mkdir()
    for name in (".ci", "flowspec_edge", "deploy", "profiles"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Dockerfile.jetson"):
        shutil.copy(ROOT / name, copy)
    for model in ("demo", "demo-sparse", "smollm2-135m"):
        (copy / "models" / model).mkdir(parents=True)
        (copy / "models" / model / "config.json").write_text("{}")
    for name in ("catalogue.toml", "parts.json"):
        shutil.copy(ROOT / "models" / name, copy / "models")
    set_version(copy, "7.8.9")
    return copy


def set_version(sources: Path, version: str) -> None:
    file = sources / "pyproject.toml"
    lines = file.read_text(encoding="utf-8").splitlines()
    [place] = [i for i, line in enumerate(lines) if line.startswith("version = ")]
    lines[place] = f'version = "{version}"'
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(("tag", "says"), [
    ("v1.2.3", "the tag is v1.2.3, and pyproject.toml has version 7.8.9: tag the commit v7.8.9, or change the version"),
    ("v7.8.9", "CHANGELOG.md has no section ## 7.8.9: write what changed")])
def test_another_tag_and_a_version_without_notes_are_refused(sources: Path, tag: str, says: str) -> None:
    done = release(sources, tag)
    assert (done.returncode, done.stderr) == (1, f"release: {says}\n")
    assert not (sources / "dist").exists()


def test_a_release_has_a_wheel_its_recipe_sums_and_notes(sources: Path) -> None:
    changes = sources / "CHANGELOG.md"
    changes.write_text("# Changes\n\n## 7.8.9 (2026-12-24)\n- It moves.\n\n## 7.8.8\n- It stood.\n", encoding="utf-8")
    done = release(sources, "v7.8.9")
    assert done.returncode == 0, done.stderr
    dist = sources / "dist"
    [wheel] = dist.glob("*.whl")
    assert wheel.name == "flowspec_edge-7.8.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert {"flowspec_edge/__main__.py", "flowspec_edge/_data/models/catalogue.toml"} <= set(archive.namelist())
    assert (dist / "NOTES.md").read_text(encoding="utf-8") == "- It moves.\n"
    sums = dict(reversed(line.split()) for line in (dist / "SHA256SUMS").read_text(encoding="utf-8").splitlines())
    assert sums == {name: hashlib.sha256((dist / name).read_bytes()).hexdigest()
                    for name in (wheel.name, "Dockerfile.jetson", "boards.txt")}


def test_this_version_has_notes() -> None:
    version = next(line.split('"')[1] for line in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
                   if line.startswith("version = "))
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
