"""Reads the boards of a plan: profiles by name or path, with a count, or a cluster.toml."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowspec_edge.boards.inventory import Role, load_inventory
from flowspec_edge.boards.planning.estimated_profile import MEASURE, board_profile, is_known
from flowspec_edge.boards.planning.planner import CandidateBoard
from flowspec_edge.boards.planning.scaling import Scaling, scaled
from flowspec_edge.device_profile import Profile, load_profile
from flowspec_edge.errors import UsageError

if TYPE_CHECKING:
    from flowspec_edge.boards.planning.model_size import ModelBytes

_CLUSTER = re.compile(r"^\s*\[\s*cluster\s*\]", re.MULTILINE)


@dataclass(frozen=True)
class BoardSpec:
    """A board as a plan is asked for it.

    layers        [lo, hi), from a cluster.toml only
    torch_device  from a cluster.toml only
    assumed       what the profile was estimated from
    """

    name: str
    profile: Profile
    role: Role = "auto"
    layers: tuple[int, int] | None = None
    torch_device: str = ""
    assumed: str = ""

    def for_model(self, size: ModelBytes) -> tuple[CandidateBoard, Scaling]:
        """Return the board with its profile scaled to the model."""
        profile, scaling = scaled(self.profile, size)
        return CandidateBoard(self.name, profile, self.role), scaling


def parse_devices(specs: Sequence[str]) -> list[BoardSpec]:
    """Return boards from ``PROFILE``, ``PROFILE:COUNT`` (a name or a TOML file) and cluster files, with their roles.

    Raise UsageError for an unknown profile, a count below 1, or duplicate names.
    """
    profiles, boards = [], []
    for text in specs:
        if is_cluster(Path(text)):
            boards += _cluster(Path(text))
            continue
        name, _, count = text.rpartition(":")
        if not name or not count.removeprefix("-").isdigit():
            name, count = text, "1"
        path = Path(name)
        if path.suffix == ".toml" and not path.exists():
            quoted_path = shlex.quote(str(path))
            raise UsageError(f"--devices {text}: there is no file {path}: find your boards with flowspec "
                             f"deploy init HOST HOST… --out {quoted_path}, or measure one on it with flowspec "
                             f"device profile --out {quoted_path}")
        if int(count) < 1:
            raise UsageError(f"--devices {text}: the count must be at least 1, not {count}")
        profiles += [load_profile(name)] * int(count)
    total, copies = Counter(p.name for p in profiles), Counter[str]()
    for profile in profiles:
        copies[profile.name] += 1
        number = f"-{copies[profile.name]}" if total[profile.name] > 1 else ""
        boards.append(BoardSpec(f"{profile.name}{number}", profile))
    for name, times in Counter(board.name for board in boards).items():
        if times > 1:
            raise UsageError(f"{times} boards have the name {name}: give each a unique name in its file")
    return boards


def is_cluster(path: Path) -> bool:
    """Return whether ``path`` is the file of a cluster, not of a profile."""
    if path.suffix != ".toml" or not path.is_file():
        return False
    return bool(_CLUSTER.search(path.read_text(encoding="utf-8", errors="replace")))


def _cluster(path: Path) -> list[BoardSpec]:
    """Return the boards of a cluster file; the relative path of a profile starts at the file's directory."""
    boards, inventory = [], load_inventory(path)
    if not any(is_known(device, path) for device in inventory.device):
        raise UsageError(f"{path}: no board has a profile, so nothing is known of their memory and speed: "
                         f"measure them with {MEASURE} {path}, or give each memory_mb and cores, from which "
                         "they are estimated")
    for device in inventory.device:
        profile, assumed = board_profile(inventory, device, path)
        boards.append(BoardSpec(device.name, profile, device.role, device.layers,
                                inventory.torch_device(device), assumed))
    return boards
