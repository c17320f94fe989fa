"""Facts about Jetson boards and JetPack releases, from ``profiles/jetson/``, each with its source."""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict

from flowspec_edge.util.resources import resource_dir
from flowspec_edge.util.tomlfile import load_toml

ORIN = (8, 7)  # compute capability of an Orin's GPU


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProcessMemory(_Strict):
    """Memory of a stage's process besides weights and caches, in 10^6 bytes.

    cuda  includes CUDA's context
    d0    what D0's process takes beyond a stage's: tokenizer, strategies, the HTTP server
    """

    cpu: float
    cuda: float
    d0: float
    provenance: Literal["estimated", "published", "measured"]
    source: str


class JetPack(_Strict):
    """One JetPack release, or several equivalent ones.

    l4t        prefix of the L4T release, such as "36.4."
    supported  whether flowspec runs on it; if not, ``reason`` says why, and ``advice`` what to do
    torch      requirement, such as "torch==2.8.0"; "" if there is none
    index      package index of that torch; "" for PyPI
    protected  whether pip refuses to install for all users without --break-system-packages (PEP 668)
    """

    l4t: str
    name: str
    cuda: str
    python: str
    supported: bool = True
    reason: str = ""
    advice: str = ""
    torch: str = ""
    numpy: str = ""
    index: str = ""
    protected: bool = False
    source: str

    def install(self, python: str = "python3") -> str:
        """Installs for all users; "" without a torch."""
        if not self.torch:
            return ""
        pip = "pip3" if python == "python3" else f"{python} -m pip"
        options = [*["--break-system-packages"] * self.protected,
                   *[f"--index-url {self.index}"] * bool(self.index)]
        return " ".join(["sudo", pip, "install", *options, f"'{self.torch}'", f"'{self.numpy}'"])


class _JetPacks(_Strict):
    jetpack: tuple[JetPack, ...]


class _Process(_Strict):
    process: ProcessMemory


@cache
def process_memory() -> ProcessMemory:
    return load_toml(resource_dir("profiles") / "jetson" / "process.toml", _Process).process


@cache
def jetpacks() -> tuple[JetPack, ...]:
    """Oldest first."""
    return load_toml(resource_dir("profiles") / "jetson" / "jetpacks.toml", _JetPacks).jetpack


def is_from(l4t: str, since: str) -> bool:
    """Whether a release of L4T, such as "36.4.7", is ``since`` or newer; False for ""."""
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(".") if part.isdigit()]

    return numbers(l4t) >= numbers(since)


def jetpack_of(l4t: str) -> JetPack | None:
    """Return the JetPack of an L4T release, such as "36.4.3"."""
    return next((release for release in jetpacks() if f"{l4t}.".startswith(release.l4t)), None)


class BoardRails(_Strict):
    """The power rails of one kind of board.

    ``rails``: INA3221 labels whose sum is the power of boards with ``model`` in their device-tree name.
    """

    model: str
    rails: tuple[str, ...]
    provenance: Literal["estimated", "published", "measured"]
    source: str


class _Boards(_Strict):
    board: tuple[BoardRails, ...]


@cache
def power_rails() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the rails of all boards, as ``drivers.observe.power_rails.total_rails`` takes them."""
    boards = load_toml(resource_dir("profiles") / "jetson" / "boards.toml", _Boards).board
    return tuple((board.model, board.rails) for board in boards)


class UsbNetwork(_Strict):
    """The network at a Jetson's USB device port: CIDR, and name prefixes of the board's interfaces."""

    network: str
    interfaces: tuple[str, ...]
    source: str


class Desktop(_Strict):
    """What a board's desktop takes; ``memory_mb`` is in 10^6 bytes."""

    memory_mb: int
    source: str


class KernelModule(_Strict):
    """A traffic-shaping module that L4T's kernel may lack, and its Kconfig option."""

    name: str
    option: str
    source: str


class SharedLibrary(_Strict):
    """A library that a torch for L4T needs and the system may lack; ``l4t`` is a prefix, "" for all."""

    l4t: str
    name: str
    install: str
    source: str


class LargePieces(_Strict):
    """Releases of L4T from ``since`` on may refuse large pieces of GPU memory.

    ``needed_mb``: the largest that flowspec asks for, 10^6 bytes.
    """

    since: str
    needed_mb: int
    fix: str
    source: str


class L4tSystem(_Strict):
    usb_network: UsbNetwork
    desktop: Desktop
    large_pieces: LargePieces
    kernel_module: tuple[KernelModule, ...]
    shared_library: tuple[SharedLibrary, ...]


@cache
def system() -> L4tSystem:
    return load_toml(resource_dir("profiles") / "jetson" / "system.toml", L4tSystem)


def shared_library_of(l4t: str, file: str) -> SharedLibrary | None:
    return next((library for library in system().shared_library
                 if f"{l4t}.".startswith(library.l4t) and file.startswith(library.name)), None)
