"""What the memory of a cluster's boards says of a model, and how its layers go over them.

Knows sizes, from config.json or from a manifest, and refuses what does not fit with what would help.  Does
not choose boards (``planner``) nor know what goes before the planner (``deployment``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from flowspec_edge.config import Profile
from flowspec_edge.fleet.inventory import ClusterSettings, DeviceEntry
from flowspec_edge.fleet.memory import ModelBytes, PlanDtype, model_bytes
from flowspec_edge.fleet.planner import Board, DoesNotFit, Problem
from flowspec_edge.fleet.refusal import refusal
from flowspec_edge.fleet.roster import Member
from flowspec_edge.fleet.splitting import Ranges, problem_for, split_in_order
from flowspec_edge.manifest import Manifest, stage_part

Stages = Sequence[tuple[DeviceEntry, tuple[int, int]]]


class Fitting:
    """A model that is not sharded, on the boards of a cluster file whose profiles are known."""

    def __init__(self, model: str, dtype: PlanDtype, cluster: ClusterSettings, at_once: int, boards: int,
                 profiles: Mapping[str, Profile]) -> None:
        """``profiles`` by the boards' names, each with [memory]; ``boards`` is how many there are."""
        self._model, self._dtype, self._cluster = model, dtype, cluster
        self._at_once, self._count, self._profiles = at_once, boards, profiles

    @cached_property
    def problem(self) -> Problem:
        """What is to be split."""
        return problem_for(self._sizes(self._dtype), self._cluster.context, self._at_once, self._count)

    def board(self, device: DeviceEntry) -> Board:
        """The planner's view of a board."""
        member = Member(device.name, self._profiles[device.name], device.role)
        return member.for_model(self.problem.size)[0]

    def split(self, draft: DeviceEntry, verify: Sequence[DeviceEntry]) -> Ranges:
        """The layers of stages in this order; DoesNotFit, in bytes, if memory is too small."""
        stages = [self.board(device) for device in verify]
        found = split_in_order(stages, self.problem)
        if found is None or self.board(draft).room < self.problem.d0:
            raise self.refusal([self.board(draft), *stages])
        return found

    def check(self, draft: DeviceEntry, stages: Stages) -> None:
        """DoesNotFit for the first board with a profile whose memory is too small for its layers."""
        if draft.name in self._profiles:
            self._check(draft, self.problem.d0, "drafting")
        for i, (device, (lo, hi)) in enumerate(stages):
            if device.name in self._profiles:
                self._check(device, self.problem.stage(hi - lo, i == 0), _share(lo, hi))

    def refusal(self, boards: Sequence[Board]) -> DoesNotFit:
        """The error when nothing fits."""
        return refusal(boards, self.problem, self._sizes, _in_file)

    def _sizes(self, dtype: PlanDtype) -> ModelBytes:
        return model_bytes(self._model, dtype)

    def _check(self, device: DeviceEntry, needs: int, what: str) -> None:
        _require(self.board(device), needs, what, self._cluster,
                 "give the board fewer layers, or leave layers out: the planner finds a split")


def check_parts(manifest: Manifest, cluster: ClusterSettings, at_once: int, stages: Stages,
                profiles: Mapping[str, Profile]) -> None:
    """DoesNotFit for the first board with a profile whose memory is too small for its part."""
    from flowspec_edge.runtime.coordinator import cache_rows
    from flowspec_edge.strategies.params import Params

    rows = cache_rows(cluster.context, at_once, Params(), len(stages))
    for i, (device, (lo, hi)) in enumerate(stages):
        if device.name in profiles:
            part = manifest.part(stage_part(i))
            _require(Board(device.name, profiles[device.name]), part.weight_bytes + part.row_bytes * rows,
                     _share(lo, hi), cluster, "cut the model otherwise, with flowspec models shard --split")


def _require(board: Board, needs: int, what: str, cluster: ClusterSettings, advice: str) -> None:
    if needs > board.room:
        raise DoesNotFit(
            f"{board.name} has too little memory for {what}: with {cluster.context} tokens of context it "
            f"needs {needs / 1e6:,.0f} MB beside the process, and has {max(board.room, 0) / 1e6:,.0f} MB: "
            f"{advice}; or a smaller context, or dtype, in [cluster]")


def _share(lo: int, hi: int) -> str:
    return f"layer {lo}" if hi - lo == 1 else f"layers {lo} to {hi - 1}"


def _in_file(key: str, value: str | int) -> str:
    return f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
