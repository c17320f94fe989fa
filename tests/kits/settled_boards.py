"""A draft device and a stage whose facts are made up: what a deployment would change there, and facts where it is done.

The manifest is of one stage; its files are nowhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.actions import Environment
from flowspec_edge.boards.deploy.diff import Diff, make_diff
from flowspec_edge.boards.deploy.resolve import Deployment
from flowspec_edge.boards.images.archive import Image
from flowspec_edge.boards.inventory import ClusterSettings, DeviceEntry, Inventory
from flowspec_edge.boards.probe.facts import BoardFacts, BoardStatus, Installed, ReleaseFacts, ServiceFacts
from flowspec_edge.boards.services.status import FleetStatus
from flowspec_edge.model.manifest import DRAFT, Manifest
from flowspec_edge.model.opened import OpenModel

REQUEST = "a" * 64
MANIFEST = Manifest.model_validate({
    "format": 1, "source": {"name": "demo", "config_sha256": "0" * 64}, "model_type": "llama", "layers": 2,
    "hidden_width": 8, "vocabulary": 9, "ranges": ((0, 2),), "dtype": "fp16", "compute_dtype": "fp16",
    "quantisation": None, "request": REQUEST,
    "parts": {part: {"files": (), "parameters": 1, "weight_bytes": 1, "row_bytes": 1}
              for part in ("stage-1", DRAFT)}})
KEYS = {"draft": "d" * 40, "stage": "s" * 40}
MODES = "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=2 NAME=MAXN >\n"
ENVIRONMENT = Environment("e" * 16, "/wheels", {"pip-1-py3-none-any.whl": "1" * 64, "flowspec.whl": "2" * 64})
STAGE_UNIT = paths.verify_unit(1)


def deployment(**settings: Any) -> Deployment:
    boards = [DeviceEntry(name="draft", address="10.0.0.1", role="draft"),
              DeviceEntry(name="stage", address="10.0.0.2", role="verify", power_mode="MAXN")]
    cluster = ClusterSettings.model_validate({"name": "lab", "serve_host": "0.0.0.0", **settings})
    return Deployment(Inventory(cluster=cluster, device=boards), Path("/lab/cluster.toml"),
                      OpenModel(Path("/lab/model")), None, None, boards[0], ((boards[1], (0, 2)),))


def status() -> FleetStatus:
    """What ran before: this model, in two releases."""
    return FleetStatus([
        BoardStatus(name, Installed("r2", "verify", place, REQUEST), Installed("r1", "verify", place, REQUEST))
        for place, name in enumerate(KEYS)])


def diff(facts: Mapping[str, BoardFacts], target: Environment | Image = ENVIRONMENT, *,
         recorded: Mapping[str, str] = KEYS, before: FleetStatus | None = None, rotate: bool = False,
         **settings: Any) -> Diff:
    return make_diff(deployment(**settings), MANIFEST, dict.fromkeys(KEYS, target), facts, recorded,
                     before or status(), (), rotate)


def settled(target: Environment | Image = ENVIRONMENT, **settings: Any) -> dict[str, BoardFacts]:
    """Boards as they are once a deployment is carried out."""
    wanted = diff({name: BoardFacts(publics=(key,)) for name, key in KEYS.items()}, target, **settings)
    assert wanted.release is not None
    facts, release, tags = {}, paths.release_dir(wanted.release), (target.tag,) if isinstance(target, Image) else ()
    roots = (paths.HOME, paths.RELEASES, paths.VENVS, paths.WHEELS, paths.MODELS)
    for place, board in enumerate(wanted.boards):
        files = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in board.state.files.items()}
        facts[board.device.name] = BoardFacts(
            ntp="yes", groups=("render", "video"),
            modes={**dict.fromkeys(roots, "755 root"), paths.STATE: "755 flowspec", paths.ETC: "700 root"},
            user={"home": paths.STATE, "shell": "/usr/sbin/nologin", "groups": ["video", "render"]},
            venvs={target.digest: True}, venv_images={target.digest: tags[0]} if tags else {},
            images=tags,
            releases={wanted.release: ReleaseFacts(files, f"../../venvs/{target.digest}")}, current=release,
            publics=(KEYS[board.device.name],), client_key=not place,
            units={path.removeprefix("units/"): sha256 for path, sha256 in files.items() if "units/" in path},
            services={STAGE_UNIT if place else paths.DRAFT_UNIT: ServiceFacts(True, True, release)},
            parts=(f"{REQUEST[:16]}/{'stage-1' if place else 'draft'}",), power_modes=MODES,
            power_number="2", power_kept=True, power_unit_installed=bool(place), power_unit_runs=True)
    return facts


def changed(found: Diff, board: str = "stage") -> list[str]:
    """The steps that change something there."""
    [one] = [each for each in found.boards if each.device.name == board]
    return [step.name for step in one.steps() if step.changed]
