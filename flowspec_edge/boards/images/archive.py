"""A Docker image as `docker save` writes it: its ids, its processor, and the flowspec in it.

Reading it needs no Docker.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flowspec_edge.boards.images import launcher
from flowspec_edge.errors import UsageError

FILE = "image.tar"  # its name on a board
NVIDIA = "nvidia"  # Docker's name of the runtime that gives a container the GPU
_ID = 16  # hex digits
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # Docker's name -> the kernel's
_INSTALLED = re.compile(r"flowspec_edge-([^/-]+)\.dist-info/METADATA$")
_HOW = "make it with: docker build -f Dockerfile.jetson -t flowspec-edge . && docker save flowspec-edge -o {path}"


@dataclass(frozen=True)
class Image:
    """A release's software, where the runtime is an image."""

    archive: str  # a local file
    size: int  # bytes
    config: str  # sha256 of the image's configuration
    ids: tuple[str, ...]  # by which Docker may know it: of the configuration, or of a manifest (containerd's store)
    names: tuple[str, ...]  # that the archive gives to it
    machine: str  # architecture, as the kernel names it
    version: str  # of flowspec in it; "" if its layers cannot be read here
    runtime: str = ""  # Docker's --runtime; "" for its default
    python: str = "python3"  # the board's system interpreter, which runs the launcher

    @property
    def tag(self) -> str:
        """By which the boards' Docker knows the image, in ``paths.IMAGE_NAME``."""
        return self.config[:_ID]

    @property
    def digest(self) -> str:
        """The digest of everything that decides how the software runs.

        The image's directory below ``paths.VENVS`` has this name.
        """
        identity = [self.config, self.runtime, self.python, inspect.getsource(launcher)]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:_ID]


def read_image(path: Path) -> Image:
    """Read the image in the archive ``path``.

    Raise UsageError if it holds none or several, or another flowspec than this.
    """
    advice = _HOW.format(path=path)
    if not path.is_file():
        raise UsageError(f"there is no image {path} (cluster.image): {advice}")
    try:
        with tarfile.open(path) as archive:
            manifests = _load(archive, "manifest.json")
            if len(manifests) != 1:
                raise UsageError(f"{path} holds {len(manifests)} images, and the boards get one: {advice}")
            config, layers = _read(archive, manifests[0]["Config"]), manifests[0]["Layers"]
            digest, settings = hashlib.sha256(config).hexdigest(), json.loads(config)
            image = Image(str(path), path.stat().st_size, digest, (f"sha256:{digest}", *_index(archive)),
                          tuple(manifests[0].get("RepoTags") or ()),
                          _MACHINES.get(settings["architecture"], settings["architecture"]), _version(archive, layers))
    except (OSError, EOFError, tarfile.TarError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = "no tar, or cut off" if isinstance(error, tarfile.ReadError) else str(error)
        raise UsageError(f"{path} is no image that docker save has written ({why}): {advice}") from error
    if image.version not in ("", version("flowspec-edge")):
        raise UsageError(f"{path} has flowspec {image.version}, and this machine {version('flowspec-edge')}: "
                         "build the image from these sources, or install its release here")
    return image


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    if member is None:
        raise LookupError(f"{name} is no file")
    return member.read()


def _load(archive: tarfile.TarFile, name: str) -> Any:
    return json.loads(_read(archive, name))


def _index(archive: tarfile.TarFile) -> Iterator[str]:
    """Yield the digests of the image's manifests; older archives have none."""
    try:
        index = _load(archive, "index.json")
    except KeyError:
        return
    yield from (str(manifest["digest"]) for manifest in index["manifests"])


def _version(archive: tarfile.TarFile, layers: Sequence[str]) -> str:
    """Return the version of the flowspec that was installed last."""
    for layer in reversed(layers):
        try:
            with tarfile.open(fileobj=archive.extractfile(layer)) as files:
                for member in files:
                    if match := _INSTALLED.search(member.name):
                        return match[1]
        except tarfile.ReadError:  # in a compression that this Python does not know
            return ""
    raise LookupError("there is no flowspec in it")
