"""A cluster that the tests deploy onto whole boards, and what they ask of it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowspec_edge.boards.deploy import wheels as wheelhouse
from flowspec_edge.boards.deploy.wheels import build_wheel
from kits import board_images
from kits.container_boards import Fleet

PROMPT = "The quick brown fox"
PATIENCE = 900.0  # seconds for a command: five boards install and start at once, on slow machines


class Cluster:
    """A fleet's boards or some of them, a cluster.toml, and `flowspec deploy` at the control place."""

    def __init__(self, fleet: Fleet, directory: Path, members: Sequence[int] = (), **settings: object) -> None:
        """``settings``: as for ``write``."""
        self.fleet, self._members = fleet, members
        self.file = directory / "cluster.toml"
        self._wheels = directory / "wheelhouse"
        if not self._wheels.is_dir():
            fill_wheelhouse(fleet, self._wheels)
        self.write(**settings)

    def write(self, **settings: object) -> None:
        """The cluster file, with ``settings`` in its [cluster]."""
        self.fleet.write_cluster(self.file, self._members, **{
            "model": "demo", "context": 512, "keys": "keys", "wheelhouse": str(self._wheels), **settings})

    def flowspec(self, *arguments: str, tree: Path = board_images.REPOSITORY) -> subprocess.CompletedProcess[str]:
        """A command for this cluster, run to its end."""
        return self.fleet.flowspec(*arguments, "--cluster", str(self.file), timeout=PATIENCE, tree=tree)

    def deploy(self, *arguments: str, tree: Path = board_images.REPOSITORY) -> dict[str, Any]:
        """What a `flowspec deploy` command says with --json, whether it succeeds or not."""
        done = self.flowspec("deploy", *arguments, "--json", tree=tree)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.stdout, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        assert told["ok"] == (not done.returncode), (told, done.stderr)
        return told

    def timed(self, *arguments: str) -> tuple[dict[str, Any], float]:
        """The same, and the seconds that the whole command took."""
        began = time.monotonic()
        return self.deploy(*arguments), time.monotonic() - began

    def tokens(self, *options: str) -> list[int]:
        """What the deployed cluster answers to PROMPT."""
        done = self.flowspec("generate", PROMPT, "--json", *options)
        assert not done.returncode, done.stderr
        tokens: list[int] = json.loads(done.stdout)["tokens"]
        return tokens

    def becomes_ready(self, within: float = PATIENCE) -> dict[str, Any]:
        """The cluster's status as soon as it is ready again: the boards see to that by themselves."""
        deadline = time.monotonic() + within
        while not (status := self.deploy("status"))["ok"]:
            assert time.monotonic() < deadline, status
        return status


def fill_wheelhouse(fleet: Fleet, wheels: Path) -> None:
    """Get the wheels of boards like board 0 into ``wheels``: the control place has no network."""
    ask = "import sys, torch; print(*sys.version_info[:2], sep='.'); print(torch.__version__)"
    python, torch = fleet.shell(0, f'python3 -c "{ask}"').split()
    gather_wheels(wheels, wheelhouse.WheelTarget(python, platform.machine(), torch))


def gather_wheels(wheels: Path, target: wheelhouse.WheelTarget) -> None:
    """The same for a kind of board.  They are kept beside the images."""
    kept = board_images.cache() / "wheelhouse"
    for place in (kept, wheels):
        place.mkdir(parents=True, exist_ok=True)
    build_wheel(wheels)
    _copy_others(kept, wheels)
    wheelhouse.fill(wheels, [target])
    _copy_others(wheels, kept)


def _copy_others(source: Path, target: Path) -> None:
    """Put all wheels but this package's own, which is another each time, into ``target``, too."""
    for wheel in source.glob("*.whl"):
        if not wheel.name.startswith("flowspec_edge-") and not (target / wheel.name).exists():
            part = target / f"{wheel.name}.{os.getpid()}"
            shutil.copyfile(wheel, part)
            part.replace(target / wheel.name)  # so that a reader finds only complete ones
