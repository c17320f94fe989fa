"""Boards' states for a deployment, read over ssh by each board's system Python as root."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

from flowspec_edge import errors
from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet import paths
from flowspec_edge.fleet.deploy.engine import board_facts
from flowspec_edge.fleet.deploy.engine.desired_state import BoardState
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.probe.facts import program
from flowspec_edge.fleet.remote.runner import as_root
from flowspec_edge.fleet.remote.ssh import runner_for
from flowspec_edge.fleet.transfer import store
from flowspec_edge.util import files

SCOPE = "deploy-flowspec"  # prefix of the transient scopes in which a board runs a deployment's commands
_TIMEOUT_S = 300.0  # hashing wheels from an SD card is slow
_PATHS = ("HOME", "RELEASES", "VENVS", "WHEELS", "STATE", "MODELS", "CACHE", "ETC", "KEY", "API_KEY",
          "POWER_BEFORE", "UNITS", "USER", "POWER_UNIT", "UNSETTLED")


@dataclass(frozen=True)
class ReleaseFacts:
    files: Mapping[str, str]  # path -> sha256
    venv: str = ""  # target of the link to the environment


@dataclass(frozen=True)
class ServiceFacts:
    active: bool = False
    enabled: bool = False  # starts at boot
    release: str = ""  # the directory that its process was started in
    key: str = ""  # sha256 of the key that its process was started with


@dataclass(frozen=True)
class BoardFacts:
    """The defaults are those of a bare board."""

    ahead: float = 0.0  # s, the board's clock minus this machine's
    within: float = 0.0  # s, error bound of ahead
    ntp: bool = False  # NTP keeps the clock
    groups: Sequence[str] = ()  # all groups on the board
    user: Mapping[str, Any] | None = None  # home, shell and groups of the services' user
    modes: Mapping[str, str | None] = field(default_factory=dict)  # path -> "755 root" or None
    venvs: Mapping[str, bool] = field(default_factory=dict)  # digest -> whether it is complete
    wheels: Mapping[str, str] = field(default_factory=dict)  # name -> sha256; empty if the venv is complete
    releases: Mapping[str, ReleaseFacts] = field(default_factory=dict)  # by id, the newest first
    current: str = ""  # link targets
    previous: str = ""
    units: Mapping[str, str] = field(default_factory=dict)  # installed unit file -> sha256
    services: Mapping[str, ServiceFacts] = field(default_factory=dict)  # running, failed or enabled
    key: str = ""  # sha256 of the key files; "" without one
    key_before: str = ""
    public: str = ""  # the keys' public halves
    public_before: str = ""
    client_key: bool = False  # the API key exists
    parts: Sequence[str] = ()  # "MODEL/PART"
    missing_bytes: int = 0  # of the wanted part
    part_changes: bool = False  # a transfer of the wanted part would change something
    power_modes: str = ""  # /etc/nvpmodel.conf
    power_number: str = ""  # of the current mode
    power_kept: bool = False  # the original mode is saved
    power_unit_installed: bool = False
    power_unit_runs: bool = False  # enabled and active

    @classmethod
    def parse(cls, told: dict[str, Any], before: float, after: float) -> BoardFacts:
        """``before`` and ``after``: times here around the run of ``board_facts``."""
        slack = max(0.0, after - before - told["seconds"])
        names = {field.name for field in fields(cls)}
        return cls(**{
            **{name: value for name, value in told.items() if name in names},
            "ahead": told["time"] - (after - slack / 2), "within": slack / 2,
            "releases": {name: ReleaseFacts(**release) for name, release in told["releases"].items()},
            "services": {name: ServiceFacts(**service) for name, service in told["services"].items()},
            "power_modes": told["power"]["modes"], "power_number": "".join(told["power"]["number"]),
            "power_kept": told["power"]["kept"], "power_unit_installed": told["power_unit"]["installed"],
            "power_unit_runs": told["power_unit"]["runs"]})


@dataclass(frozen=True)
class PartWanted:
    name: str  # the model's directory name
    files: tuple[tuple[str, int, str], ...]  # path, size, sha256
    manifest_sha256: str


def ask_boards(inventory: Inventory, boards: Sequence[tuple[DeviceEntry, BoardState, PartWanted | None]],
               end_others: bool = False) -> list[BoardFacts | FlowspecError]:
    """The facts of each board, or an error that names the board; all boards in parallel.

    ``end_others``: first end what an interrupted run left, which would change the board after it was read.
    """
    others = f"{SCOPE}-*.scope" if end_others else ""

    def one(board: tuple[DeviceEntry, BoardState, PartWanted | None]) -> BoardFacts | FlowspecError:
        device, state, part = board
        wanted = [part.name, [list(file) for file in part.files], part.manifest_sha256] if part else None
        environment = state.environment.digest if state.environment else ""
        text = program(f"main({ {name: getattr(paths, name) for name in _PATHS}!r}, "
                       f"{environment!r}, {wanted!r}, {others!r})", errors, files, store, board_facts)
        before = time.time()
        try:
            said = runner_for(inventory, device, _TIMEOUT_S).run(
                as_root([inventory.cluster.board_python, "-"]), text)
            return BoardFacts.parse(json.loads(said.splitlines()[-1]), before, time.time())
        except FlowspecError as error:
            return error
        except (ValueError, LookupError, TypeError):
            return FlowspecError(f"{device.name}: {inventory.cluster.board_python} gave no answer: see "
                                 "whether board_python in the cluster file is a Python")

    with ThreadPoolExecutor(max(1, len(boards))) as pool:
        return list(pool.map(one, boards))
