"""The manifest: which files are valid, and every way in which a part can differ from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.manifest import Manifest

FILES = {"stage-1/config.json": b"{}", "stage-1/layer-00000.safetensors": b"layer", "stage-2/x": b"\x00" * 3,
         "draft/target/config.json": b"{}", "draft/eagle2/model.safetensors": b"head"}


def manifest_of(files: dict[str, bytes]) -> dict[str, Any]:
    parts: dict[str, Any] = {name: {"files": [], "parameters": 1, "weight_bytes": 2, "row_bytes": 3}
                             for name in ("stage-1", "stage-2", "draft")}
    for path, data in files.items():
        parts[path.split("/")[0]]["files"].append(
            {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    return {"format": 1, "source": {"name": "x", "config_sha256": "0" * 64, "revision": None},
            "model_type": "llama", "layers": 3, "hidden_width": 4, "vocabulary": 5,
            "ranges": [[0, 2], [2, 3]], "dtype": "int4", "compute_dtype": "bf16", "request": "0" * 64,
            "quantisation": {"kind": "int4", "group": 128, "kept": []}, "parts": parts}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for path, data in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest_of(FILES)))
    return tmp_path


def test_it_reads_and_checks(model: Path) -> None:
    manifest = Manifest.read(model)
    assert manifest.stages == 2
    assert manifest.ranges == ((0, 2), (2, 3))
    assert manifest.part("draft").size == 6
    done: list[int] = []
    for part in manifest.parts:
        manifest.check(part, done.append)
    assert sum(done) == sum(map(len, FILES.values()))
    with pytest.raises(UsageError, match="'stage-3'"):
        manifest.check("stage-3")
    with pytest.raises(UsageError, match=r"2 stages, not 3"):
        manifest.check_stages(3)


def test_a_board_has_its_own_part(model: Path) -> None:
    for path in FILES:
        if not path.startswith("stage-2"):
            (model / path).unlink()
    manifest = Manifest.read(model)
    manifest.check("stage-2")
    with pytest.raises(FlowspecError, match=r"stage-1/config\.json"):
        manifest.check("stage-1")


@pytest.mark.parametrize(("damage", "complaint"), [
    (lambda m: (m / "stage-1/layer-00000.safetensors").write_bytes(b"Layer"),
     r"stage-1/layer-00000\.safetensors has been altered"),
    (lambda m: (m / "stage-1/layer-00000.safetensors").write_bytes(b"layers"),
     r"layer-00000\.safetensors has 6 bytes, and manifest\.json says 5"),
    (lambda m: (m / "stage-1/config.json").unlink(), r"stage-1/config\.json is missing"),
    (lambda m: (m / "stage-1/notes").touch(), r"stage-1/notes is not in manifest\.json: remove it"),
    (lambda m: (m / "stage-1/.hidden").touch(), r"stage-1/\.hidden is not in manifest\.json"),
    (lambda m: ((m / "stage-1/deep").mkdir(), (m / "stage-1/deep/x").symlink_to("/nowhere")),
     r"stage-1/deep/x is not in manifest\.json"),
])
def test_what_differs_is_named(model: Path, damage: Callable[[Path], object], complaint: str) -> None:
    damage(model)
    manifest = Manifest.read(model)
    with pytest.raises(FlowspecError, match=complaint):
        manifest.check("stage-1")
    manifest.check("stage-2")


@pytest.mark.parametrize(("change", "complaint"), [
    ({"format": 2}, "has format 2, and this flowspec reads 1"),
    ({"format": "1"}, "has format '1'"),
    ({"layers": 4}, "the ranges end at layer 3 of 4"),
    ({"layers": "3"}, r"manifest\.json: layers: Input should be a valid integer"),
    ({"ranges": [[0, 2], [1, 3]]}, r"must follow one another, and \[1, 3\) does not"),
    ({"ranges": [[0, 0], [0, 3]]}, r"\[0, 0\) does not"),
    ({"ranges": [[0, 3]]}, "there must be the parts draft, stage-1"),
    ({"more": 1}, r"manifest\.json: more: Extra inputs"),
    ({"dtype": "int3"}, r"manifest\.json: dtype: Input should be"),
])
def test_what_is_no_manifest(model: Path, change: dict[str, Any], complaint: str) -> None:
    (model / "manifest.json").write_text(json.dumps({**manifest_of(FILES), **change}))
    with pytest.raises(FlowspecError, match=complaint) as caught:
        Manifest.read(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["/etc/passwd", "stage-1/../../x", "stage-2/x", "stage-1"])
def test_files_lie_in_their_part(model: Path, path: str) -> None:
    fields = manifest_of(FILES)
    fields["parts"]["stage-1"]["files"][0]["path"] = path
    (model / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(FlowspecError, match="does not lie in stage-1"):
        Manifest.read(model)


def test_none_and_nonsense(model: Path) -> None:
    (model / "manifest.json").write_text("{")
    with pytest.raises(FlowspecError, match=r"manifest\.json is not valid JSON"):
        Manifest.read(model)
    with pytest.raises(UsageError, match=r"manifest\.json"):
        Manifest.read(model / "stage-1")
