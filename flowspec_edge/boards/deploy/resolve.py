"""Resolves a cluster file: the boards' roles, their order and their layers.

The file decides first, then the cut of a sharded model, then the planner.  A board without a profile is
estimated from its memory and processor.  If nothing is known of any board, all count as equal and are used in
file order: the first one with role "auto" drafts unless another has role "draft", and the layers are split
evenly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flowspec_edge.boards.images.archive import NVIDIA, Image, read_image
from flowspec_edge.boards.inventory import ClusterSettings, DeviceEntry, Inventory, beside, device_profile
from flowspec_edge.boards.planning.draft_turn import DraftTurn, device_mismatch, draft_turn
from flowspec_edge.boards.planning.estimated_profile import MEASURE, board_profile, is_known
from flowspec_edge.boards.planning.layer_split import Ranges, split_evenly
from flowspec_edge.boards.planning.planned_draft import StoredDraft
from flowspec_edge.boards.planning.planner import DoesNotFit
from flowspec_edge.boards.planning.scaling import at_context
from flowspec_edge.boards.probe.checks import Needs
from flowspec_edge.d0.capacity import cache_rows, tentative_rows
from flowspec_edge.device_profile import Profile
from flowspec_edge.errors import UsageError
from flowspec_edge.model.catalogue import find_known_model
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, OWN, head_kinds
from flowspec_edge.model.manifest import DRAFT, HeadBits, Manifest, ShardDtype, stage_part
from flowspec_edge.model.opened import OpenModel, resolve_model, shipped_models
from flowspec_edge.strategies.draft_choice import AS_LINE, draft_kind, missing_draft, with_a_draft
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.util.jetson import process_memory

if TYPE_CHECKING:
    from flowspec_edge.boards.planning.memory_check import MemoryCheck
    from flowspec_edge.boards.planning.model_size import PlanDtype

Stages = tuple[tuple[DeviceEntry, tuple[int, int]], ...]
UnusedBoards = tuple[tuple[DeviceEntry, str], ...]
_Selection = tuple[DeviceEntry, Stages, UnusedBoards]
PLAN_DTYPES: Mapping[str, PlanDtype] = {
    "auto": "fp16", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "int4": "int4", "nf4": "int4",
    "fp4": "int4"}
# Disk for an environment: wheels (70 MB), their unpacked files (209), compiled .pyc files (115 at most), and
# bitsandbytes (91), measured with the versions of deploy/constraints.txt on x86_64.
ENVIRONMENT_BYTES = 500_000_000
_MEGA = 10**6


@dataclass(frozen=True)
class Deployment:
    """A resolved cluster file."""

    inventory: Inventory
    path: Path  # of the cluster file
    model: OpenModel
    head: Path | None  # a separate draft head's directory; None: the model's own head
    dtype: ShardDtype | None  # to store weights in; None: unchanged
    draft: DeviceEntry
    stages: Stages  # V1…VN, each with its layers [lo, hi)
    unused_boards: UnusedBoards = ()  # unused boards, and why
    notes: tuple[str, ...] = ()  # unknown facts, and what will be slow
    turn: DraftTurn | None = None  # None unless all profiles are known
    lm_head: HeadBits | None = None  # of lm_head and EAGLE heads; None: the sharder's default

    @property
    def cluster(self) -> ClusterSettings:
        return self.inventory.cluster

    @property
    def boards(self) -> list[DeviceEntry]:
        """The ring: D0, V1…VN."""
        return [self.draft, *(device for device, _ in self.stages)]

    @property
    def ranges(self) -> Ranges:
        """[lo, hi) of each stage."""
        return tuple(layers for _, layers in self.stages)

    @property
    def at_once(self) -> int:
        return _at_once(self.cluster, len(self.stages))

    @property
    def cache_rows(self) -> int:
        """The rows of the KV caches that each stage allocates at its start."""
        return cache_rows(self.cluster.context, self.at_once, Params(), len(self.stages))

    @property
    def caches(self) -> tuple[int, int, int]:
        """The arguments of ``ShardPart.cache_bytes``: rows, requests at once, and uncommitted rows of each."""
        return self.cache_rows, self.at_once, tentative_rows(Params(), len(self.stages))

    @property
    def work(self) -> Path:
        """The directory of a rollout's local files, next to the cluster file."""
        return self.path.parent / ".flowspec" / self.cluster.name

    @property
    def shards(self) -> Path:
        """Where the sharded model is or will be."""
        return self.model.path if self.model.sharded else self.work / "model"

    @property
    def keys(self) -> Path:
        return beside(self.path, self.cluster.keys)

    @cached_property
    def image(self) -> Image | None:
        """The boards' software, before ``on_board``; None where each board has an environment.

        Raise UsageError if the archive is missing or unfit.
        """
        return read_image(beside(self.path, self.cluster.image)) if self.cluster.in_image else None

    @property
    def wheelhouse(self) -> Path:
        return beside(self.path, self.cluster.wheelhouse)

    @property
    def decided(self) -> Inventory:
        """The inventory of the boards in use, in ring order, with definite roles."""
        boards = [device.model_copy(update={"role": "verify" if i else "draft", "layers": None})
                  for i, device in enumerate(self.boards)]
        return self.inventory.model_copy(update={"device": boards})


@dataclass(frozen=True)
class _WithHead(OpenModel):
    """A model as it will be sharded: with the cluster file's draft model in the place of its own of that kind."""

    head: Path | None = None

    @cached_property
    def _head_kind(self) -> str:
        from flowspec_edge.sharding.drafts import open_draft  # torch takes a while

        return open_draft(self.head).kind.name if self.head else ""

    def draft(self, kind: str) -> Path | None:
        return self.head if kind == self._head_kind else super().draft(kind)


def drafting(cluster: ClusterSettings, model: OpenModel, head: Path | None = None) -> StoredDraft | None:
    """Return what requests of the cluster draft with, by the rule that they follow.

    head  the draft model that the cluster file names, if it names a directory

    None if they draft with nothing that takes memory.
    """
    model_with_head = _WithHead(model.path, model.quantised, head)
    kind = draft_kind(strategy_class(cluster.strategy), Params(draft=cluster.draft_kind), model_with_head)
    directory = model_with_head.draft(kind) if kind and DRAFT_KINDS[kind].directory else None
    return StoredDraft(DRAFT_KINDS[kind], directory) if kind and directory else None


def resolve_deployment(inventory: Inventory, path: Path) -> Deployment:
    """Decide what ``path``, read as ``inventory``, leaves open.

    Raise UsageError for a model that is missing or contradicts the file.  Raise ``planner.DoesNotFit`` if a board's
    memory is too small.
    """
    path = path.absolute()
    model, head = _model(inventory.cluster, path)
    inventory, notes = _with_a_draft(inventory, path, model, head)
    profiles_used = {device.name: board_profile(inventory, device, path) for device in inventory.device}
    missing = [name for name, (_, assumed) in profiles_used.items() if assumed]
    unknown = not any(is_known(device, path) for device in inventory.device)
    profiles = {} if unknown else {name: profile for name, (profile, _) in profiles_used.items()}
    unknown_memory = {device.name for device in inventory.device if device.name in missing and not device.memory_mb}
    choice = _Choice(inventory, path, model, profiles, unknown_memory, head)
    if model.sharded:
        draft, stages, unused = choice.as_cut()
    elif inventory.decided:
        draft, stages, unused = choice.as_listed()
    elif unknown:
        draft, stages, unused = choice.alike()
    else:
        draft, stages, unused = choice.planned()
    dtype = None if inventory.cluster.dtype == "auto" else inventory.cluster.dtype
    lm_head = None if inventory.cluster.lm_head == "auto" else inventory.cluster.lm_head
    if unknown:
        notes += [f"no profile with [memory] for {', '.join(missing)}: whether the model fits there is seen "
                 "when they are looked at" + ("" if inventory.decided else ", and boards count as alike")
                 + f"; measure with: {MEASURE} {path.name}"]
    elif missing:
        sources = "; ".join(f"{name} from {profiles_used[name][1]}" for name in missing)
        notes += [f"no profile with [memory] for {', '.join(missing)}: ESTIMATED, {sources}; measure with: "
                 f"{MEASURE} {path.name}"]
    used_names = {draft.name, *(device.name for device, _ in stages)}
    turn = choice.turn(draft, stages) if used_names.isdisjoint(missing) else None  # no warning from estimates
    notes += [f"{device.name}: {why}" for device in inventory.device if device.name in profiles
              and (why := device_mismatch(profiles[device.name], inventory.torch_device(device)))]
    if turn is not None and turn.is_bottleneck:
        notes.append(turn.warning(draft.name))
    return Deployment(inventory, path, model, head, dtype, draft, stages, unused, tuple(notes), turn,
                      lm_head)


def _model(cluster: ClusterSettings, path: Path) -> tuple[OpenModel, Path | None]:
    if not cluster.model:
        raise UsageError(f'{path}: [cluster] has no model: give a directory, or model = "demo" to try')
    directory = beside(path, cluster.model)
    is_name = cluster.model in shipped_models() or (find_known_model(cluster.model) and not directory.is_dir())
    model = resolve_model(cluster.model if is_name else directory)
    if not cluster.draft or cluster.draft_kind != OWN:
        return model, None
    head = beside(path, cluster.draft)
    if model.sharded:
        raise UsageError(f"{path}: cluster.draft: {model.path} is sharded and has its draft models already: "
                         "leave draft out, or give the checkpoint as the model")
    if not (head / "config.json").is_file():
        raise UsageError(f"{path}: cluster.draft: {head} is not a draft model's directory: it has no "
                         "config.json")
    return model, head


def _with_a_draft(inventory: Inventory, path: Path, model: OpenModel, head: Path | None
                  ) -> tuple[Inventory, list[str]]:
    """Return ``inventory`` with look-ups in the text where there is nothing else to draft with, and notes about it.

    Raise UsageError if neither ``model`` nor ``head`` is what the strategy drafts with.
    """
    cluster = inventory.cluster
    strategy, params = strategy_class(cluster.strategy), Params(draft=cluster.draft_kind)
    if head is None:
        params, note = with_a_draft(strategy, params, model, AS_LINE)
        if note:
            looks_up = cluster.model_copy(update={"draft": params.draft})
            return inventory.model_copy(update={"cluster": looks_up}), [note]
    kind = draft_kind(strategy, params, model)
    if kind is None or not DRAFT_KINDS[kind].directory or model.draft(kind):
        return inventory, []
    besides = ""
    if head is not None:
        from flowspec_edge.sharding.drafts import open_draft  # torch takes a while

        head_kind = open_draft(head).kind
        if head_kind.name == kind or ({DRAFT_KINDS[kind], head_kind} <= {*head_kinds()}):
            return inventory, []
        besides = f", and {head} is a {head_kind.title} (kind {head_kind.name})"
    raise UsageError(f"{path}: [cluster]: {missing_draft(strategy, kind, model, AS_LINE, besides)}")


class _Choice:
    """The ways to choose roles and layers.

    Each public method but ``turn`` returns the draft device, the stages and the unused boards.
    """

    def __init__(self, inventory: Inventory, path: Path, model: OpenModel, profiles: Mapping[str, Profile],
                 unknown_memory: Collection[str] = (), head: Path | None = None) -> None:
        """Take what the choice depends on.

        unknown_memory  boards whose memory is not known either: their memory refuses nothing
        head            as for ``Deployment``
        """
        self._inventory, self._path, self._model, self._profiles = inventory, path, model, profiles
        self._unknown_memory, self._head = unknown_memory, head

    def as_cut(self) -> _Selection:
        """Choose as many stages as the sharded model has; boards with role "auto" may be left out."""
        cluster, path, manifest = self._inventory.cluster, self._path, self._model.require_manifest()
        home, count = manifest.directory, manifest.stages
        if cluster.dtype not in ("auto", manifest.dtype):
            raise UsageError(f"{path}: cluster.dtype: {home} was made with {manifest.dtype}, not "
                             f"{cluster.dtype}: leave dtype out, or give the checkpoint as the model")
        head = manifest.lm_head.kind if manifest.lm_head else "16bit"
        if cluster.lm_head not in ("auto", head):
            raise UsageError(f"{path}: cluster.lm_head: {home} was made with {head}, not {cluster.lm_head}: "
                             "leave lm_head out, or give the checkpoint as the model")
        if cluster.kv_cache not in ("16bit", manifest.kv_cache):
            raise UsageError(f"{path}: cluster.kv_cache: {home} was made with {manifest.kv_cache}, not "
                             f"{cluster.kv_cache}: leave kv_cache out, or give the checkpoint as the model")
        draft, others = _in_file_order(self._inventory)
        verify_count = sum(device.role == "verify" for device in others)
        if not verify_count <= count <= len(others):
            has = max(verify_count, min(len(others), count))
            raise UsageError(
                f"{path}: {home} was cut into {count} stages, and beside {draft.name} the file lists {has} "
                f"board{'s' if has != 1 else ''} for them: list {count}, cut it again with: flowspec models "
                f"shard --stages {has}, or give the checkpoint as the model")
        used_boards, spare = _first(others, count)
        stages = tuple(zip(used_boards, manifest.ranges, strict=True))
        for device, layers in stages:
            if device.layers not in (None, layers):
                raise UsageError(f"{path}: device {device.name}: {home} was cut so that it has layers "
                                 f"{list(layers)}: leave layers out, or give the checkpoint as the model")
        if self._profiles:
            from flowspec_edge.boards.planning.memory_check import check_parts

            profiles = {name: profile for name, profile in self._profiles.items() if name not in self._unknown_memory}
            check_parts(manifest, cluster, _at_once(cluster, count), stages, profiles)
        return draft, stages, tuple((device, f"{home} was cut into {count} stages") for device in spare)

    def as_listed(self) -> _Selection:
        """Choose all boards in file order, with their own layers or the split whose slowest stage is fastest."""
        draft, verify, layers = self._inventory.draft, self._inventory.verify, self._model.layers
        listed_layers = [device.layers for device in verify if device.layers is not None]
        if listed_layers and listed_layers[-1][1] != layers:
            raise UsageError(f"{self._path}: device {verify[-1].name}: its layers end with {listed_layers[-1][1]}, "
                             f"and {self._model.name} has {layers}: the last one ends with {layers}")
        if len(verify) > layers:
            raise UsageError(f"{self._path}: {len(verify)} verify devices are more than the {layers} layers "
                             f"of {self._model.name}: leave some out")
        if not listed_layers and self._profiles:
            try:
                return draft, tuple(zip(verify, self._fitting().split(draft, verify), strict=True)), ()
            except DoesNotFit:
                if not self._unknown_memory:
                    raise
        stages = tuple(zip(verify, listed_layers or split_evenly(layers, len(verify)), strict=True))
        self._check(draft, stages)
        return draft, stages, ()

    def alike(self) -> _Selection:
        """Choose boards without profiles: in file order, with an even split."""
        draft, others = _in_file_order(self._inventory)
        used_boards, spare = _first(others, self._model.layers)
        stages = tuple(zip(used_boards, split_evenly(self._model.layers, len(used_boards)), strict=True))
        self._check(draft, stages)
        why = f"{self._model.name} has no more than {self._model.layers} layers"
        return draft, stages, tuple((device, why) for device in spare)

    def planned(self) -> _Selection:
        from flowspec_edge.boards.planning.planner import plan
        from flowspec_edge.boards.planning.throughput import Throughput

        fitting, entries = self._fitting(), {device.name: device for device in self._inventory.device}
        boards = [fitting.board(device) for device in self._inventory.device]
        try:
            split = plan(boards, fitting.problem, Throughput(fitting.problem, fitting.at_once))
        except DoesNotFit:
            error = fitting.error(boards)
            if self._unknown_memory:
                raise DoesNotFit(f"{error}.  The memory of {', '.join(sorted(self._unknown_memory))} is not known: "
                                 f"give memory_mb there, or measure with: {MEASURE} {self._path}") from None
            raise error from None
        return (entries[split.d0.name], tuple((entries[s.board.name], s.layers) for s in split.stages),
                tuple((entries[board.name], why) for board, why in split.unused_boards))

    def turn(self, draft: DeviceEntry, stages: Stages) -> DraftTurn | None:
        """Return how long D0 takes in each slot.

        None if a profile is missing, or for a sharded model, to which profiles are not scaled.
        """
        if self._model.sharded or any(device.name not in self._profiles
                                      for device in (draft, *(device for device, _ in stages))):
            return None
        fitting, cluster = self._fitting(), self._inventory.cluster
        problem = fitting.problem
        slot = max(fitting.board(device).profile.stage_seconds(problem.rows, hi - lo, cluster.context)
                   for device, (lo, hi) in stages)
        profile = at_context(fitting.board(draft).profile, problem.size, problem.context)
        return draft_turn(profile, slot, problem.rows, problem.size.planned.kind,
                          self._inventory.torch_device(draft))

    def _check(self, draft: DeviceEntry, stages: Stages) -> None:
        if self._profiles:
            self._fitting().check(draft, stages, self._unknown_memory)

    def _fitting(self) -> MemoryCheck:
        from flowspec_edge.boards.planning.memory_check import MemoryCheck

        cluster, boards = self._inventory.cluster, len(self._inventory.device)
        return MemoryCheck(str(self._model.path), PLAN_DTYPES[cluster.dtype], cluster,
                       _at_once(cluster, boards - 1), boards, self._profiles,
                       drafting(cluster, self._model, self._head))


def _at_once(cluster: ClusterSettings, stages: int) -> int:
    return cluster.at_once or max(2, stages)


def _in_file_order(inventory: Inventory) -> tuple[DeviceEntry, list[DeviceEntry]]:
    draft = min(inventory.device, key=lambda device: ("draft", "auto", "verify").index(device.role))
    return draft, [device for device in inventory.device if device is not draft]


def _first(devices: list[DeviceEntry], count: int) -> tuple[list[DeviceEntry], list[DeviceEntry]]:
    """Return ``count`` of ``devices``, preferably those with role "verify", and the others.

    Both lists keep the order of ``devices``.
    """
    preferred = sorted(devices, key=lambda device: device.role != "verify")[:count]
    names = {device.name for device in preferred}
    return ([device for device in devices if device.name in names],
            [device for device in devices if device.name not in names])


def process_bytes(deployment: Deployment, device: DeviceEntry) -> int:
    """Return a service's memory without weights and caches.

    The figure is from the board's profile if that was measured on the same torch device, otherwise as on known boards.
    """
    torch_device = deployment.inventory.torch_device(device)
    profile, memory = device_profile(device, deployment.path), process_memory()
    megabytes = memory.cuda if torch_device.startswith("cuda") else memory.cpu
    if profile and profile.memory and not device_mismatch(profile, torch_device):
        megabytes = profile.memory.process_mb
    return round((megabytes + memory.d0 * (device == deployment.boards[0])) * _MEGA)


def d0_bytes(deployment: Deployment, manifest: Manifest) -> int:
    """Return the bytes of the draft device's weights and caches.

    Of the draft models that were sharded, the one that requests use counts.  Another one is loaded once a request
    names its strategy.
    """
    from flowspec_edge.sharding.drafts import drafts_of
    from flowspec_edge.stage.quant.schemes import head_scheme
    from flowspec_edge.util.tensors import parse_dtype

    part, stored = manifest.part(DRAFT), OpenModel(manifest.directory)
    used = drafting(deployment.cluster, stored)
    width = parse_dtype(manifest.compute_dtype).itemsize
    packed = head_scheme(manifest.lm_head.kind if manifest.lm_head else "16bit")
    others = [draft for draft in drafts_of(stored, ()) if used is None or draft.kind != used.kind]
    return part.weight_bytes + part.cache_bytes(*deployment.caches) - sum(
        draft.weight_bytes(width, packed) + deployment.cache_rows * draft.kv_row * width for draft in others)


def on_board(inventory: Inventory, device: DeviceEntry, image: Image) -> Image:
    """Return the image as a board runs it: by its own Python, with the GPU where that is what computes."""
    on_gpu = inventory.torch_device(device).startswith("cuda")
    return replace(image, runtime=NVIDIA if on_gpu else "", python=inventory.cluster.board_python)


def needs_of(deployment: Deployment, manifest: Manifest) -> dict[str, Needs]:
    """Return what a deployment needs on each board, by name."""
    cluster, image = deployment.cluster, deployment.image
    needs = {}
    for rank, device in enumerate(deployment.boards):
        part = manifest.part(stage_part(rank - 1)) if rank else None
        part_bytes = (part.weight_bytes + part.cache_bytes(*deployment.caches) if part
                      else d0_bytes(deployment, manifest))
        ports = (cluster.data_port,) if rank else (cluster.control_port, cluster.data_port,
                                                   cluster.serve_port)
        needs[device.name] = Needs(
            home_bytes=image.size if image else ENVIRONMENT_BYTES,
            image=on_board(deployment.inventory, device, image) if image else None,
            memory_bytes=part_bytes + process_bytes(deployment, device),
            ports=ports,
            dtype=manifest.dtype if rank else "")
    return needs
