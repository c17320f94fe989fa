"""The cost model of a cluster: a profile and a share of the layers for each device; collectives.

A group of devices that share every layer, as in Megatron-LM (arXiv 1909.08053) and Galaxy (INFOCOM 2024), is
computed whole and charged here. Every collective is charged as a ring: in a step each device sends one tile,
an N-th of the padded rows, to the next one and waits for its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Protocol

from flowspec_edge.d0.jobs import Job
from flowspec_edge.d0.prompt_chunks import MOST, USUAL
from flowspec_edge.d0.session import DraftPass, Verify
from flowspec_edge.device_profile import MixedBoards, Profile
from flowspec_edge.errors import UsageError
from flowspec_edge.strategies.base import Parallelism

_BLOCKS = 2  # a layer's attention and its MLP


class StageSeconds(Protocol):
    """The time of a pass; ``correlation``, ``alike``: as for ``StageCurve.milliseconds``."""

    def __call__(self, rows: int, context: int, correlation: float | None = None, alike: float = 1.0, /
                 ) -> float: ...


@dataclass(frozen=True)
class Devices:
    """D0 (place 0) and its stages V1…VN (places 1 to N).

    layers  of the profiles' model, by stage; a fraction is allowed
    name    label of figures under these devices
    most_rows  of a prompt's segment, for which every stage has memory
    """

    d0: Profile
    stages: tuple[Profile, ...]
    layers: tuple[float, ...]
    name: str
    most_rows: int = MOST

    def __post_init__(self) -> None:
        if not self.stages or len(self.stages) != len(self.layers):
            raise UsageError(f"{len(self.stages)} stages cannot have {len(self.layers)} shares of the layers")
        shapes = {(p.model.layers, p.model.hidden_width, p.model.bytes_per_value)
                  for p in (self.d0, *self.stages)}
        if len(shapes) > 1:
            raise UsageError("the devices' profiles describe different models (layers, width, bytes a value: "
                             f"{', '.join(map(str, sorted(shapes)))}); use profiles of one model")
        if abs(sum(self.layers) - self.d0.model.layers) > 1e-6:
            raise UsageError(f"the stages have {sum(self.layers):g} layers in all, "
                             f"but the profiles' model has {self.d0.model.layers}")

    @classmethod
    def from_profile(cls, profile: Profile, stages: int) -> Devices:
        """Return the devices of a testbed of several kinds.

        Of any other profile ``stages`` equal devices that share the model's layers evenly, and an equal D0.
        UsageError as ``Profile.check_stages``.
        """
        profile.check_stages(stages)
        if isinstance(profile, MixedBoards):
            return cls(profile, profile.verify, tuple(map(float, profile.layers)), profile.name)
        return cls(profile, (profile,) * stages, (profile.model.layers / stages,) * stages, profile.name)

    def stage_seconds(self, stage: int, rows: int, context: int = 0, correlation: float | None = None,
                      alike: float = 1.0) -> float:
        """Time of Vi (``stage`` = i) for ``rows`` rows with ``context`` tokens in its cache.

        correlation, alike  as for ``StageCurve.milliseconds``
        """
        return self.stages[stage - 1].stage_seconds(rows, self.layers[stage - 1], context,
                                                    correlation=correlation, alike=alike)

    @property
    def sparse(self) -> bool:
        """Whether the profiles' model has experts."""
        return any(profile.stage.shared_ms for profile in self.stages)

    def slot_seconds(self, rows: int) -> float:
        """Time of a segment in the slowest stage."""
        return max(self.stage_seconds(stage, rows) for stage in range(1, len(self.stages) + 1))

    def occupied_seconds(self, rows: int) -> float:
        """Time of a segment in the slowest stage plus the slowest link after a stage."""
        if rows not in self._occupied:  # a scheduler asks for up to 256 lengths of every batch
            self._occupied[rows] = self.prompt_seconds(rows, 0)
        return self._occupied[rows]

    @cached_property
    def most_prompt_rows(self) -> int:
        """Rows of a prompt's segment at most: those for which there is memory, and times.

        A curve that is flat to its end says nothing of more rows.
        """
        ends = [profile.stage.rows[-1] for profile in self.stages if not profile.stage.rises]
        return min(self.most_rows, max(USUAL, int(min(ends, default=MOST))))

    def prompt_seconds(self, rows: int, context: int) -> float:
        """:meth:`occupied_seconds` with ``context`` tokens in the caches."""
        size = rows * self.d0.model.hidden_width * self.d0.model.bytes_per_value
        ring = [*range(1, len(self.stages) + 1), 0]
        link = max(self.hop_seconds(a, b, size)[0] for a, b in pairwise(ring))
        return max(self.stage_seconds(stage, rows, context) for stage in ring[:-1]) + link

    @cached_property
    def _occupied(self) -> dict[int, float]:
        """The seconds of prompts by their number of rows, as far as they have been computed."""
        return {}

    def link_row_seconds(self) -> float:
        """Mean time of a row's hidden state over a link after a stage, as a round trip measures it."""
        size = self.d0.model.hidden_width * self.d0.model.bytes_per_value
        ring = [*range(1, len(self.stages) + 1), 0]
        return sum(self.hop_seconds(a, b, size)[0] for a, b in pairwise(ring)) / len(self.stages)

    def hop_seconds(self, sender: int, receiver: int, size: int) -> tuple[float, float]:
        """(Time that ``size`` bytes occupy the link, latency after that), at the speed of the slower port."""
        sender_times = self._profile(sender).link_seconds(size)
        receiver_times = self._profile(receiver).link_seconds(size)
        return max(sender_times[0], receiver_times[0]), max(sender_times[1], receiver_times[1])

    def compute_seconds(self, parallelism: Parallelism) -> Sequence[StageSeconds]:
        """Return the times of each stage of a pipeline, or of one tensor-parallel group.

        A group shares the layers evenly and is as fast as its slowest device.
        """
        numbers = range(1, len(self.stages) + 1)
        if parallelism == "pipeline":
            return [partial(self.stage_seconds, stage) for stage in numbers]
        distinct = {id(p): p for p in self.stages}.values()
        n = len(self.stages)
        return [lambda rows, context, *_: max(tensor_seconds(p, parallelism, rows, n, context)
                                              for p in distinct)]

    def latency_seconds(self, rows: int, parallelism: Parallelism) -> float:
        """Time of a segment from D0 through all stages to its tokens."""
        parts = self.compute_seconds(parallelism)
        hidden = rows * self.d0.model.hidden_width * self.d0.model.bytes_per_value
        following = [*range(2, len(parts) + 1), 0]  # the receiver of each part's results
        hops = sum(sum(self.hop_seconds(sender, receiver, hidden))
                   for sender, receiver in enumerate(following, start=1))
        return sum(seconds(rows, 0) for seconds in parts) + hops + self.d0.verify_seconds(rows)

    def job_seconds(self, job: Job) -> float:
        """Time of D0's work: one pass for all parts, bookkeeping for each."""
        tasks = [task for _, task in job.parts]
        outputs = [len(task.output.numbers) for task in tasks if isinstance(task, Verify)]
        if outputs:
            return self.d0.verify_seconds(sum(outputs), len(outputs))
        draft_session = job.parts[0][0]
        requests = [task.request for task in tasks if isinstance(task, DraftPass)]
        nodes, drafter = sum(len(request.nodes) for request in requests), draft_session.drafter
        scored = drafter is not None and drafter.scores_only(requests[0])
        return self.d0.draft_seconds(draft_session.draft_kind, nodes, scored)

    def _profile(self, rank: int) -> Profile:
        return self.stages[rank - 1] if rank else self.d0


def tile_bytes(profile: Profile, rows: int, devices: int) -> int:
    """Return the bytes of one tile's hidden states. The rows are padded to a multiple of the devices."""
    return -(-rows // devices) * profile.model.hidden_width * profile.model.bytes_per_value


def rings_of(profile: Profile) -> int:
    """Rings in a pass: each block of a layer begins with one and ends with one."""
    return profile.model.layers * _BLOCKS * 2


def step_seconds(profile: Profile, rows: int, devices: int) -> float:
    """One step of a ring: a tile over the link, and the profile's fixed cost of a step."""
    occupied, latency = profile.link_seconds(tile_bytes(profile, rows, devices))
    return occupied + latency + profile.collective.step_ms * 1e-3


def tensor_seconds(profile: Profile, parallelism: Parallelism, rows: int, devices: int,
                   context: int = 0) -> float:
    """Time of ``rows`` rows through all layers on ``devices``, with ``context`` tokens cached.

    Megatron-LM: two all-reduces per layer, 2 (N - 1) steps each, after the compute. Galaxy: two all-gathers
    and two reduce-scatters per layer, each on N tiles of equal work, with N - 1 steps that overlap with the
    work on a tile; one last all-gather collects the rows.
    """
    layers = profile.model.layers
    compute = profile.stage_seconds(rows, layers, context, devices)
    if devices == 1 or not rows:
        return compute
    step = step_seconds(profile, rows, devices)
    if parallelism == "megatron":
        return compute + layers * _BLOCKS * 2 * (devices - 1) * step
    rings = rings_of(profile)
    tile = compute / (rings * devices)
    return rings * (tile + (devices - 1) * max(step, tile)) + (devices - 1) * step


def tensor_bytes(profile: Profile, parallelism: Parallelism, rows: int, devices: int) -> int:
    """Bytes that all devices together send for ``rows`` rows."""
    if not rows:
        return 0
    ring = devices * (devices - 1) * tile_bytes(profile, rows, devices)
    rings = rings_of(profile) + (parallelism == "galaxy")
    return rings * ring
