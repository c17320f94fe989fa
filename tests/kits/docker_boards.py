"""Boards with Debian's Docker and no torch, and an image for them, whose archive is written without Docker.

What loads and runs the image on a board is Docker itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flowspec_edge.boards.commands import search_path
from flowspec_edge.boards.deploy.wheels import WheelTarget, environment
from flowspec_edge.util.bounded_read import sha256_of
from kits import board_images, container_boards
from kits.deployments import gather_wheels

BOARD = dataclasses.replace(
    container_boards.BOARD, name="docked", wheels=(), constraints="",
    packages=(*container_boards.BOARD.packages, "docker.io", "tini"))
# A container's systemd leaves the control groups of version 1 read-only, and Docker makes groups in them.  Those of
# cpuset belong to the whole machine.
_CGROUPS = """[Service]
ExecStartPre=/bin/sh -c 'umount /sys/fs/cgroup/cpuset; for group in $(findmnt -rnt cgroup -o TARGET); do \\
    mount -o remount,bind,rw $group; done; true'
"""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_PACKAGES = "usr/local/lib/python3.11/dist-packages"
_LEFT_OUT = (*(f"{_PACKAGES}/torch/{name}" for name in ("test", "include", "bin/protoc*")), "dev", "proc", "sys", "run",
             "boot", "usr/include", "usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache", "var/lib/apt",
             "var/log", "usr/lib/modules", "usr/lib/systemd")
_FLOWSPEC = "#!/usr/bin/python3\nimport sys\nfrom flowspec_edge.__main__ import main\nsys.exit(main())\n"


class DockerFleet(container_boards.Fleet):
    """Boards of ``BOARD``; their Docker's files are not on the overlay, on which Docker makes no other."""

    def __init__(self, directory: Path, boards: int = 2) -> None:
        super().__init__(directory, boards, [BOARD] * boards)

    def _prepare(self, board: int) -> None:
        super()._prepare(board)
        place = self.directory / self.name(board)
        (place / "docker").mkdir()
        drop_in = place / "disk/etc/systemd/system/docker.service.d/cgroups.conf"
        drop_in.parent.mkdir(parents=True)
        drop_in.write_text(_CGROUPS)

    def _options(self, board: int) -> list[str]:
        return [f"--bind={self.directory / self.name(board) / 'docker'}:/var/lib/docker",
                "--system-call-filter=@keyring bpf"]


def write_image(archive: Path, wheels: Path, machine: str = platform.machine()) -> None:
    """Write an image with torch, flowspec and what it needs, as `docker save` does; ``wheels``: a directory for
    these."""
    gather_wheels(wheels, _target())
    with tempfile.TemporaryDirectory(dir=archive.parent) as directory:
        layer = Path(directory) / "wheels.tar"
        _tar(_installed(wheels, Path(directory) / "root"), layer)
        write_archive(archive, [_base(), layer], machine)


def write_archive(archive: Path, layers: Sequence[Path], machine: str = platform.machine()) -> None:
    """Write an image of these layers, each a tar."""
    digests = [sha256_of(layer) for layer in layers]
    config = json.dumps({
        "architecture": _ARCHITECTURES.get(machine, machine), "os": "linux",
        "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "Entrypoint": ["flowspec"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]}}).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": name, "RepoTags": ["flowspec-edge:latest"],
                            "Layers": [f"{digest}/layer.tar" for digest in digests]}]).encode()
    with tarfile.open(archive, "w") as out:
        for layer, digest in zip(layers, digests, strict=True):
            out.add(layer, f"{digest}/layer.tar")
        for path, text in ((name, config), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(path)
            entry.size = len(text)
            out.addfile(entry, io.BytesIO(text))


def _target() -> WheelTarget:
    torch = next((board_images.image(container_boards.BOARD) / _PACKAGES).glob("torch-*.dist-info")).name
    return WheelTarget("3.11", platform.machine(), torch.removeprefix("torch-").removesuffix(".dist-info"))


def _base() -> Path:
    """The layer with the system and torch, kept beside the boards' images."""
    root = board_images.image(container_boards.BOARD)
    layer = root.with_suffix(".layer.tar")
    if not layer.is_file():
        _tar(root, layer, _LEFT_OUT)
    return layer


def _tar(root: Path, tar: Path, left_out: Sequence[str] = ()) -> None:
    part = tar.with_name(f"{tar.name}.{os.getpid()}")
    excluded = [f"--exclude=./{name}" for name in left_out]
    subprocess.run(["tar", "--create", "--sort=name", "--numeric-owner", f"--file={part}", f"--directory={root}",
                    *excluded, "."], check=True, env={**os.environ, "PATH": search_path()})
    part.replace(tar)


def _installed(wheels: Path, root: Path) -> Path:
    """Everything of ``wheels`` that Debian's Python can use, as pip installs it for all users."""
    names = [str(wheels / name) for name in environment(wheels, _target()).wheels if not name.startswith("numpy-")]
    site = root / _PACKAGES
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
                    "--python-version", "3.11", "--only-binary=:all:", "--target", str(site), *names], check=True)
    shutil.rmtree(site / "bin", ignore_errors=True)
    program = root / "usr/local/bin/flowspec"
    program.parent.mkdir(parents=True)
    program.write_text(_FLOWSPEC)
    program.chmod(0o755)
    return root
