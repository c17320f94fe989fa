"""Checks whether a model fits in the memory of the boards, and explains in one line why it does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from flowspec_edge.boards.inventory import ClusterSettings, DeviceEntry
from flowspec_edge.boards.planning.board_spec import BoardSpec
from flowspec_edge.boards.planning.layer_split import Ranges, problem_for, split_in_order
from flowspec_edge.boards.planning.model_size import ModelBytes, PlanDtype, model_bytes
from flowspec_edge.boards.planning.one_board import other_programs
from flowspec_edge.boards.planning.planned_draft import StoredDraft
from flowspec_edge.boards.planning.planner import CandidateBoard, DoesNotFit, SplitProblem, most_layers
from flowspec_edge.device_profile import Profile
from flowspec_edge.model.draft_kinds import NGRAM
from flowspec_edge.model.manifest import CacheBits, Manifest, stage_part

_CONTEXTS = (8192, 4096, 2048, 1024, 512)
_MOST_BOARDS = 64  # further boards of one kind are not suggested

Stages = Sequence[tuple[DeviceEntry, tuple[int, int]]]
SizeIn = Callable[[PlanDtype, CacheBits], ModelBytes]  # the same model's sizes in other types
Setting = Callable[[str, str | int], str]  # how the user writes a setting


class MemoryCheck:
    def __init__(self, model: str, dtype: PlanDtype, cluster: ClusterSettings, at_once: int, boards: int,
                 profiles: Mapping[str, Profile], drafting: StoredDraft | None = None) -> None:
        """Take what the boards' memory must hold.

        profiles  by the boards' names, each with [memory]
        boards    size of the cluster
        drafting  what requests draft with; None: with nothing that takes memory
        """
        self._model, self._dtype, self._cluster = model, dtype, cluster
        self.at_once, self._count, self._profiles = at_once, boards, profiles
        self._drafting = drafting

    @cached_property
    def problem(self) -> SplitProblem:
        size = self._sizes(self._dtype, self._cluster.kv_cache)
        return problem_for(size, self._cluster.context, self.at_once, self._count)

    def board(self, device: DeviceEntry) -> CandidateBoard:
        spec = BoardSpec(device.name, self._profiles[device.name], device.role)
        return spec.for_model(self.problem.size)[0]

    def split(self, draft: DeviceEntry, verify: Sequence[DeviceEntry]) -> Ranges:
        """Return the layers of the stages in this order; raise DoesNotFit, in bytes, if memory is too small."""
        stages = [self.board(device) for device in verify]
        ranges = split_in_order(stages, self.problem)
        if ranges is None or self.board(draft).room < self.problem.d0:
            raise self.error([self.board(draft), *stages])
        return ranges

    def check(self, draft: DeviceEntry, stages: Stages, unknown_memory: Collection[str] = ()) -> None:
        """Raise DoesNotFit for the first board whose memory is too small for its layers.

        Boards without a profile, and those in ``unknown_memory``, are not checked.
        """
        with_profile = self._profiles.keys() - set(unknown_memory)
        if draft.name in with_profile:
            self._check(draft, self.problem.d0, "drafting")
        for device, (lo, hi) in stages:
            if device.name in with_profile:
                self._check(device, self.problem.stage(hi - lo), _layer_range(lo, hi))

    def error(self, boards: Sequence[CandidateBoard]) -> DoesNotFit:
        return memory_error(boards, self.problem, self._sizes, _toml_setting)

    def _sizes(self, dtype: PlanDtype, kv_cache: CacheBits) -> ModelBytes:
        bits = self._cluster.lm_head
        return model_bytes(self._model, dtype, None if bits == "auto" else bits, kv_cache, NGRAM.name, self._drafting)

    def _check(self, device: DeviceEntry, needs: int, purpose: str) -> None:
        _require(self.board(device), needs, purpose, self._cluster,
                 "give the board fewer layers, or remove layers from the file: the planner finds a split")


def check_parts(manifest: Manifest, cluster: ClusterSettings, concurrency: int, stages: Stages,
                profiles: Mapping[str, Profile]) -> None:
    """Check the stages of a sharded model as :meth:`MemoryCheck.check` does.

    D0's memory is checked with its board.
    """
    from flowspec_edge.d0.capacity import cache_rows, tentative_rows
    from flowspec_edge.strategies.params import Params

    each = tentative_rows(Params(), len(stages))
    rows = cache_rows(cluster.context, concurrency, Params(), len(stages))
    for i, (device, (lo, hi)) in enumerate(stages):
        if device.name in profiles:
            part = manifest.part(stage_part(i))
            board = CandidateBoard(device.name, profiles[device.name])
            needs = part.weight_bytes + part.cache_bytes(rows, concurrency, each)
            _require(board, needs, _layer_range(lo, hi), cluster,
                     "shard the model with other layers, with flowspec models shard --split")


def _require(board: CandidateBoard, needs: int, purpose: str, cluster: ClusterSettings, advice: str) -> None:
    if needs > board.room:
        raise DoesNotFit(
            f"{board.name} has too little memory for {purpose}: with {cluster.context} tokens of context it "
            f"needs {needs / 1e6:,.0f} MB beside the process, and has {max(board.room, 0) / 1e6:,.0f} MB: "
            f"{advice}; or set a smaller context, or dtype, in [cluster]")


def _layer_range(lo: int, hi: int) -> str:
    return f"layer {lo}" if hi - lo == 1 else f"layers {lo} to {hi - 1}"


def _toml_setting(key: str, value: str | int) -> str:
    return f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"


def _option(key: str, value: str | int) -> str:
    return f"--{key.replace('_', '-')} {value}"


def memory_error(boards: Sequence[CandidateBoard], problem: SplitProblem, size_in: SizeIn,
                 setting: Setting = _option) -> DoesNotFit:
    """Return the error for a problem for which ``planner.plan`` or ``layer_split`` found no split."""
    size, layers_with_room = problem.size, most_layers(boards, problem)
    if layers_with_room >= size.layers:  # only this order or these layers do not fit
        return DoesNotFit(
            f"{size.name} in {size.dtype} with {problem.context} tokens of context does not fit on the "
            f"boards as they are listed. Room beside the process: {_rooms(boards, problem)}. It would with "
            'other layers: let the planner choose, with role = "auto" and without layers')
    needed_bytes = problem.stage(size.layers) + problem.d0
    text = (f"{size.name} in {size.dtype} with {problem.context} tokens of context needs {_mb(needed_bytes)}: "
            f"{size.layers} layers of {_mb(size.layer)} and {_mb(problem.layer - size.layer)} of cache, "
            f"{_mb(problem.d0)} on D0")
    if layers_with_room < 0:
        text += ". No board that may draft has room for D0's part"
    else:
        missing = size.layers - layers_with_room
        text += (f". Beside D0 there is room for {_layers(layers_with_room)}; {_layers(missing)} "
                 f"({_mb(missing * problem.layer)}) are missing")
    others = other_programs(boards, problem)
    note = f". {others.text[:1].upper()}{others.text[1:]}" if others.boards else ""
    return DoesNotFit(f"{text}. Room beside the process: {_rooms(boards, problem)}. "
                      f"{_advice(boards, problem, size_in, setting)}{note}")


def _rooms(boards: Sequence[CandidateBoard], problem: SplitProblem) -> str:
    groups: dict[tuple[str, int], list[str]] = {}
    for board in boards:
        groups.setdefault((board.profile.name, max(board.room, 0)), []).append(board.name)
    layers = {board.name: _layers(problem.layers_within(board)) for board in boards}
    return "; ".join(f"{', '.join(names)}{' each' if len(names) > 1 else ''} {_mb(room)}, {layers[names[0]]}"
                     for (_, room), names in groups.items())


def _advice(boards: Sequence[CandidateBoard], problem: SplitProblem, size_in: SizeIn,
            setting: Setting) -> str:
    def fits(changed: SplitProblem, on: Sequence[CandidateBoard] = boards) -> bool:
        return most_layers(on, changed) >= changed.size.layers

    suggestions = []
    smaller: tuple[PlanDtype, ...] = ("fp16", "int4")
    for dtype in smaller:
        if problem.size.dtype in ("int4", dtype) or (problem.size.dtype == "bf16" and dtype == "fp16"):
            continue
        if fits(replace(problem, size=size_in(dtype, problem.size.kv_cache))):
            suggestions.append(setting("dtype", dtype))
            break
    if problem.size.kv_cache != "int8" and fits(replace(problem, size=size_in(problem.size.dtype, "int8"))):
        suggestions.append(setting("kv_cache", "int8"))
    shorter = (c for c in _CONTEXTS if c < problem.context and fits(replace(problem, context=c)))
    if (context := next(shorter, None)) is not None:
        suggestions.append(setting("context", context))
    largest = replace(max(boards, key=lambda b: b.room), role="auto")
    for more in range(1, _MOST_BOARDS + 1):
        if fits(problem, [*boards, *[largest] * more]):
            suggestions.append(f"{more} more like {largest.name}")
            break
    return f"What would help: {', or '.join(suggestions)}" if suggestions else "More memory on each board would help"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"
