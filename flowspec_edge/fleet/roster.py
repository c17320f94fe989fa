"""Boards as a person names them: profiles by name or path, several alike, or a cluster.toml.

Knows how such a text becomes boards with names and roles.  Does not know the model they are for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowspec_edge.config import Profile, load_profile
from flowspec_edge.errors import UsageError
from flowspec_edge.fleet.inventory import device_profile, load_inventory
from flowspec_edge.fleet.memory import ModelBytes
from flowspec_edge.fleet.planner import Board, Role
from flowspec_edge.fleet.scaling import scaled

_CLUSTER = re.compile(r"^\s*\[\s*cluster\s*\]", re.MULTILINE)


@dataclass(frozen=True)
class Member:
    """A board, and the profile that its kind was measured with.

    layers        [lo, hi) that its file says
    torch_device  on which its file says that it computes; "" without a file
    """

    name: str
    profile: Profile
    role: Role = "auto"
    layers: tuple[int, int] | None = None
    torch_device: str = ""

    def for_model(self, size: ModelBytes) -> tuple[Board, str]:
        """The board with its profile scaled to a model, and what was scaled ("" for nothing)."""
        profile, how = scaled(self.profile, size)
        return Board(self.name, profile, self.role), how


def parse_devices(given: Sequence[str]) -> list[Member]:
    """Boards from any number of ``PROFILE``, ``PROFILE:COUNT`` (a name, or a TOML file's path) and
    paths of cluster files, whose roles are kept.

    UsageError for what is unknown, a count below 1, or two boards of one name.
    """
    profiles, members = [], []
    for text in given:
        if _is_cluster(Path(text)):
            members += _cluster(Path(text))
            continue
        name, _, count = text.rpartition(":")
        if not name or not count.removeprefix("-").isdigit():
            name, count = text, "1"
        if int(count) < 1:
            raise UsageError(f"--devices {text}: how many must be at least 1, not {count}")
        profiles += [load_profile(name)] * int(count)
    total, seen = Counter(p.name for p in profiles), Counter[str]()
    for profile in profiles:
        seen[profile.name] += 1
        number = f"-{seen[profile.name]}" if total[profile.name] > 1 else ""
        members.append(Member(f"{profile.name}{number}", profile))
    for name, times in Counter(member.name for member in members).items():
        if times > 1:
            raise UsageError(f"{times} boards are called {name}: give each a name of its own in its file")
    return members


def _is_cluster(path: Path) -> bool:
    if path.suffix != ".toml" or not path.is_file():
        return False
    return bool(_CLUSTER.search(path.read_text(encoding="utf-8", errors="replace")))


def _cluster(path: Path) -> list[Member]:
    """The boards of a cluster.toml; a profile's relative path counts from the file's directory."""
    members, inventory = [], load_inventory(path)
    for device in inventory.device:
        profile = device_profile(device, path)
        if profile is None:
            raise UsageError(f"{path}: device {device.name} has no profile, so nothing is known of its "
                             "memory and speed: measure it with flowspec device profile, and name the file")
        members.append(Member(device.name, profile, device.role, device.layers,
                              inventory.torch_device(device)))
    return members
