"""What a cluster file comes to: which board drafts, which are stages, in which order, with which layers.

Knows what goes before what: what the file says of a board, then how a sharded model was cut, then the
planner.  Does not know what is installed on a board (``rendering``), nor how (``rollout``).

The planner needs a profile of every board.  Without all of them boards count as alike: they are taken in
the order of the file, the first one whose role is "auto" drafts where no other does, and the layers are
split evenly; memory is then checked only where a profile tells of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowspec_edge.config import Profile
from flowspec_edge.errors import UsageError
from flowspec_edge.fleet.draft_turn import DraftTurn, draft_turn, other_device
from flowspec_edge.fleet.inventory import ClusterSettings, DeviceEntry, Inventory, beside, device_profile
from flowspec_edge.fleet.splitting import Ranges, split_evenly
from flowspec_edge.manifest import Manifest, ShardDtype
from flowspec_edge.modeldir import ModelDir, resolve_model, shipped_models

if TYPE_CHECKING:
    from flowspec_edge.fleet.fitting import Fitting
    from flowspec_edge.fleet.memory import PlanDtype

Stages = tuple[tuple[DeviceEntry, tuple[int, int]], ...]
LeftOut = tuple[tuple[DeviceEntry, str], ...]
_Chosen = tuple[DeviceEntry, Stages, LeftOut]
PLAN_DTYPES: Mapping[str, PlanDtype] = {
    "auto": "fp16", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "int4": "int4", "nf4": "int4",
    "fp4": "int4"}


@dataclass(frozen=True)
class Deployment:
    """A cluster file, decided.

    path      the cluster file; what it names relatively lies beside it
    model     as it is given, sharded or not
    head      a draft head's checkpoint that goes along; None: those in the model's own directory
    dtype     that weights are to be stored in; None: as they are, or as a sharded model was made
    stages    the boards of V1…VN and their layers [lo, hi)
    left_out  boards that do nothing, and why
    notes     what was not known when this was decided, and what will be slow
    turn      the draft device's work beside the slowest stage's, where every board's profile is known
    """

    inventory: Inventory
    path: Path
    model: ModelDir
    head: Path | None
    dtype: ShardDtype | None
    draft: DeviceEntry
    stages: Stages
    left_out: LeftOut = ()
    notes: tuple[str, ...] = ()
    turn: DraftTurn | None = None

    @property
    def cluster(self) -> ClusterSettings:
        """What all boards share."""
        return self.inventory.cluster

    @property
    def boards(self) -> list[DeviceEntry]:
        """All that do something, the draft device first, then the stages in order."""
        return [self.draft, *(device for device, _ in self.stages)]

    @property
    def ranges(self) -> Ranges:
        """[lo, hi) of each stage."""
        return tuple(layers for _, layers in self.stages)

    @property
    def at_once(self) -> int:
        """Requests that share the stages."""
        return _at_once(self.cluster, len(self.stages))

    @property
    def work(self) -> Path:
        """Where a rollout keeps what it makes, beside the cluster file."""
        return self.path.parent / ".flowspec" / self.cluster.name

    @property
    def shards(self) -> Path:
        """Where the sharded model is, or is to be made."""
        return self.model.path if self.model.sharded else self.work / "model"

    @property
    def keys(self) -> Path:
        """The directory of the boards' public keys."""
        return beside(self.path, self.cluster.keys)

    @property
    def wheelhouse(self) -> Path:
        """The directory of the wheels that boards get."""
        return beside(self.path, self.cluster.wheelhouse)

    @property
    def decided(self) -> Inventory:
        """The inventory with a definite role for every board that does something, in their order; the
        others are not in it."""
        boards = [device.model_copy(update={"role": "verify" if i else "draft", "layers": None})
                  for i, device in enumerate(self.boards)]
        return self.inventory.model_copy(update={"device": boards})


def resolve_deployment(inventory: Inventory, path: Path) -> Deployment:
    """Decide what ``path``, read as ``inventory``, leaves open.

    UsageError for a model that is not there or does not go with what the file says;
    ``planner.DoesNotFit`` if a board's memory is too small.
    """
    path = path.absolute()
    model, head = _model(inventory.cluster, path)
    profiles = {device.name: profile for device in inventory.device
                if (profile := device_profile(device, path)) and profile.memory}
    missing = [device.name for device in inventory.device if device.name not in profiles]
    chosen = _Choice(inventory, path, model, profiles)
    if model.sharded:
        draft, stages, left_out = chosen.as_cut()
    elif inventory.decided:
        draft, stages, left_out = chosen.as_listed()
    elif missing:
        draft, stages, left_out = chosen.alike()
    else:
        draft, stages, left_out = chosen.planned()
    dtype = None if inventory.cluster.dtype == "auto" else inventory.cluster.dtype
    notes = [f"no profile with [memory] for {', '.join(missing)}: whether the model fits there is not known"
             + ("" if inventory.decided else ", and boards count as alike")
             + "; measure with: flowspec device profile"] if missing else []
    turn = chosen.turn(draft, stages)
    notes += [f"{device.name}: {why}" for device in inventory.device if device.name in profiles
              and (why := other_device(profiles[device.name], inventory.torch_device(device)))]
    if turn is not None and turn.is_bottleneck:
        notes.append(turn.warning(draft.name))
    return Deployment(inventory, path, model, head, dtype, draft, stages, left_out, tuple(notes), turn)


def _model(cluster: ClusterSettings, path: Path) -> tuple[ModelDir, Path | None]:
    if not cluster.model:
        raise UsageError(f'{path}: [cluster] has no model: give a directory, or model = "demo" to try')
    model = resolve_model(cluster.model if cluster.model in shipped_models() else
                          beside(path, cluster.model))
    if not cluster.draft:
        return model, None
    head = beside(path, cluster.draft)
    if model.sharded:
        raise UsageError(f"{path}: cluster.draft: {model.path} is sharded and has its draft models already: "
                         "leave draft out, or give the checkpoint as the model")
    if not (head / "config.json").is_file():
        raise UsageError(f"{path}: cluster.draft: {head} is not a draft model's directory: it has no "
                         "config.json")
    return model, head


class _Choice:
    """The ways to choose; each gives the draft device, the stages and who is left out."""

    def __init__(self, inventory: Inventory, path: Path, model: ModelDir, profiles: Mapping[str, Profile]
                 ) -> None:
        self._inventory, self._path, self._model, self._profiles = inventory, path, model, profiles

    def as_cut(self) -> _Chosen:
        """As many stages as the model was cut into; of boards whose role is open some may be too many."""
        cluster, path, manifest = self._inventory.cluster, self._path, Manifest.read(self._model.path)
        home, count = manifest.directory, manifest.stages
        if cluster.dtype not in ("auto", manifest.dtype):
            raise UsageError(f"{path}: cluster.dtype: {home} was made with {manifest.dtype}, not "
                             f"{cluster.dtype}: leave dtype out, or give the checkpoint as the model")
        draft, others = _in_file_order(self._inventory)
        wanted = sum(device.role == "verify" for device in others)
        if not wanted <= count <= len(others):
            has = max(wanted, min(len(others), count))
            raise UsageError(
                f"{path}: {home} was cut into {count} stages, and beside {draft.name} the file lists {has} "
                f"board{'s' if has != 1 else ''} for them: list {count}, cut it again with: flowspec models "
                f"shard --stages {has}, or give the checkpoint as the model")
        used, spare = _first(others, count)
        stages = tuple(zip(used, manifest.ranges, strict=True))
        for device, layers in stages:
            if device.layers not in (None, layers):
                raise UsageError(f"{path}: device {device.name}: {home} was cut so that it has layers "
                                 f"{list(layers)}: leave layers out, or give the checkpoint as the model")
        if self._profiles:
            from flowspec_edge.fleet.fitting import check_parts

            check_parts(manifest, cluster, _at_once(cluster, count), stages, self._profiles)
        return draft, stages, tuple((device, f"{home} was cut into {count} stages") for device in spare)

    def as_listed(self) -> _Chosen:
        """All boards, in the order of the file; with their own layers, or so that the slowest is fast."""
        draft, verify, layers = self._inventory.draft, self._inventory.verify, self._model.layers
        given = [device.layers for device in verify if device.layers is not None]
        if given and given[-1][1] != layers:
            raise UsageError(f"{self._path}: device {verify[-1].name}: its layers end with {given[-1][1]}, "
                             f"and {self._model.name} has {layers}: the last one ends with {layers}")
        if len(verify) > layers:
            raise UsageError(f"{self._path}: {len(verify)} verify devices are more than the {layers} layers "
                             f"of {self._model.name}: leave some out")
        if not given and len(self._profiles) == len(self._inventory.device):
            return draft, tuple(zip(verify, self._fitting().split(draft, verify), strict=True)), ()
        stages = tuple(zip(verify, given or split_evenly(layers, len(verify)), strict=True))
        self._check(draft, stages)
        return draft, stages, ()

    def alike(self) -> _Chosen:
        """Boards of which nothing is known, in the order of the file, with an even split."""
        draft, others = _in_file_order(self._inventory)
        used, spare = _first(others, self._model.layers)
        stages = tuple(zip(used, split_evenly(self._model.layers, len(used)), strict=True))
        self._check(draft, stages)
        why = f"{self._model.name} has no more than {self._model.layers} layers"
        return draft, stages, tuple((device, why) for device in spare)

    def planned(self) -> _Chosen:
        """What is best by the boards' profiles."""
        from flowspec_edge.fleet.planner import DoesNotFit, plan

        fitting, entries = self._fitting(), {device.name: device for device in self._inventory.device}
        boards = [fitting.board(device) for device in self._inventory.device]
        try:
            made = plan(boards, fitting.problem)
        except DoesNotFit:
            raise fitting.refusal(boards) from None
        return (entries[made.d0.name], tuple((entries[s.board.name], s.layers) for s in made.stages),
                tuple((entries[board.name], why) for board, why in made.left_out))

    def turn(self, draft: DeviceEntry, stages: Stages) -> DraftTurn | None:
        """D0's work beside the slowest stage's; None without a profile of each, or for a sharded model, whose
        layers' bytes profiles are not scaled by."""
        if self._model.sharded or any(device.name not in self._profiles
                                      for device in (draft, *(device for device, _ in stages))):
            return None
        fitting, cluster = self._fitting(), self._inventory.cluster
        rows = fitting.problem.rows
        slot = max(fitting.board(device).profile.stage_seconds(rows, hi - lo, cluster.context)
                   for device, (lo, hi) in stages)
        return draft_turn(fitting.board(draft).profile, slot, rows)

    def _check(self, draft: DeviceEntry, stages: Stages) -> None:
        if self._profiles:
            self._fitting().check(draft, stages)

    def _fitting(self) -> Fitting:
        from flowspec_edge.fleet.fitting import Fitting

        cluster, boards = self._inventory.cluster, len(self._inventory.device)
        return Fitting(str(self._model.path), PLAN_DTYPES[cluster.dtype], cluster,
                       _at_once(cluster, boards - 1), boards, self._profiles)


def _at_once(cluster: ClusterSettings, stages: int) -> int:
    return cluster.at_once or max(2, stages)


def _in_file_order(inventory: Inventory) -> tuple[DeviceEntry, list[DeviceEntry]]:
    """The draft device, or the first that may be it, and the others."""
    draft = min(inventory.device, key=lambda device: ("draft", "auto", "verify").index(device.role))
    return draft, [device for device in inventory.device if device is not draft]


def _first(devices: list[DeviceEntry], count: int) -> tuple[list[DeviceEntry], list[DeviceEntry]]:
    """So many of ``devices``, those that are to verify before others; and the rest; both in order."""
    kept = sorted(devices, key=lambda device: device.role != "verify")[:count]
    names = {device.name for device in kept}
    return ([device for device in devices if device.name in names],
            [device for device in devices if device.name not in names])
