"""What an archive of `docker save` says of its image.  Docker loads such archives in tests/e2e/test_deploy_image."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from kits import docker_boards

from flowspec_edge.boards.images.archive import read_image
from flowspec_edge.errors import UsageError

PACKAGES = "usr/local/lib/python3.10/dist-packages"


def layer(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return path


def members(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def write(archive: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(archive, "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return archive


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An image for boards, with an older flowspec below this one."""
    older = layer(tmp_path / "1.tar", f"./{PACKAGES}/flowspec_edge-0.1.0.dist-info/METADATA")
    newer = layer(tmp_path / "2.tar", "bin/sh",
                  f"{PACKAGES}/flowspec_edge-{version('flowspec-edge')}.dist-info/METADATA")
    docker_boards.write_archive(tmp_path / "image.tar", [older, newer, layer(tmp_path / "3.tar", "home/flowspec")],
                                "aarch64")
    return tmp_path / "image.tar"


def test_an_image_says_what_board_and_flowspec_it_has(archive: Path) -> None:
    found = read_image(archive)
    assert (found.machine, found.version, found.size) == ("aarch64", version("flowspec-edge"), archive.stat().st_size)
    assert found.ids == (f"sha256:{found.config}",)
    assert found.names == ("flowspec-edge:latest",)
    assert found.tag == found.config[:16]


def test_what_decides_how_it_runs_is_in_its_digest(archive: Path) -> None:
    found = read_image(archive)
    assert len({found.digest, replace(found, runtime="nvidia").digest, replace(found, python="python3.10").digest,
                replace(found, config="0" * 64).digest}) == 4
    assert replace(found, archive="/elsewhere").digest == found.digest


def test_a_manifest_s_digest_is_another_id(archive: Path) -> None:
    """As archives since Docker 25 have it, by which a Docker with containerd's store knows the image."""
    index = json.dumps({"manifests": [{"digest": f"sha256:{'b' * 64}"}]}).encode()
    write(archive, {**members(archive), "index.json": index})
    assert read_image(archive).ids[1:] == (f"sha256:{'b' * 64}",)


def test_layers_may_be_compressed(archive: Path) -> None:
    plain = read_image(archive)
    write(archive, {name: gzip.compress(data) if name.endswith("layer.tar") else data
                    for name, data in members(archive).items()})
    found = read_image(archive)
    assert (found.config, found.version) == (plain.config, plain.version)


def test_another_release_is_refused(tmp_path: Path) -> None:
    docker_boards.write_archive(tmp_path / "image.tar", [
        layer(tmp_path / "1.tar", f"{PACKAGES}/flowspec_edge-0.0.9.dist-info/METADATA")])
    with pytest.raises(UsageError, match=r"image.tar has flowspec 0\.0\.9, and this machine \d.*: build the image"):
        read_image(tmp_path / "image.tar")


def test_an_archive_that_is_no_image_says_how_to_make_one(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    with pytest.raises(UsageError, match=r"there is no image .*: make it with: docker build .* docker save"):
        read_image(path)
    docker_boards.write_archive(path, [layer(tmp_path / "1.tar", "bin/sh")])
    with pytest.raises(UsageError, match=r"there is no flowspec in it"):
        read_image(path)
    whole = members(path)
    write(path, {**whole, "manifest.json": json.dumps(json.loads(whole["manifest.json"]) * 2).encode()})
    with pytest.raises(UsageError, match="holds 2 images, and the boards get one"):
        read_image(path)
    for data in (b"", b"not a tar at all" * 99, write(tmp_path / "other.tar", {"a": b"b"}).read_bytes(),
                 write(tmp_path / "other.tar", {"manifest.json": b"{}"}).read_bytes(),
                 write(tmp_path / "other.tar", {"manifest.json": b'[{"Config": "x"}]'}).read_bytes()):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=r"image\.tar (is no image|holds 0 images)"):
            read_image(path)
