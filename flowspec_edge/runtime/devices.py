"""Which device takes how long: D0 and the stages, each with a profile and its share of the layers.

Knows who computes what and over whose ports a message goes.  Does not know when (``virtual``,
``emulation``) nor who decided on the split (``fleet.planner``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from flowspec_edge.config import Profile
from flowspec_edge.errors import UsageError
from flowspec_edge.runtime.collectives import tensor_seconds
from flowspec_edge.runtime.coordinator import Coordinator, Task, Verify
from flowspec_edge.strategies.base import Parallelism


@dataclass(frozen=True)
class Devices:
    """D0 and its stages V1…VN; place 0 is D0's, place i that of Vi.

    layers  how many layers of the profiles' model each stage has; a fraction is allowed
    name    what figures under these devices are labelled with
    """

    d0: Profile
    stages: tuple[Profile, ...]
    layers: tuple[float, ...]
    name: str

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
    def even(cls, profile: Profile, stages: int) -> Devices:
        """``stages`` devices alike that share the model's layers evenly, and D0 like them."""
        return cls(profile, (profile,) * stages, (profile.model.layers / stages,) * stages, profile.name)

    def stage_seconds(self, place: int, rows: int, context: int = 0) -> float:
        """How long Vi (``place`` = i) computes ``rows`` rows with ``context`` tokens in its cache."""
        return self.stages[place - 1].stage_seconds(rows, self.layers[place - 1], context)

    def slot_seconds(self, rows: int) -> float:
        """A segment of ``rows`` rows in the slowest stage."""
        return max(self.stage_seconds(place, rows) for place in range(1, len(self.stages) + 1))

    def occupied_seconds(self, rows: int) -> float:
        """What a segment of ``rows`` rows takes in the slowest stage and over the slowest link after it."""
        size = rows * self.d0.model.hidden_width * self.d0.model.bytes_per_value
        ring = [*range(1, len(self.stages) + 1), 0]
        return self.slot_seconds(rows) + max(self.hop_seconds(a, b, size)[0] for a, b in pairwise(ring))

    def link_row_seconds(self) -> float:
        """What a row's hidden state takes over a link after a stage, on average over the links, as a round
        trip shows it."""
        size = self.d0.model.hidden_width * self.d0.model.bytes_per_value
        ring = [*range(1, len(self.stages) + 1), 0]
        return sum(self.hop_seconds(a, b, size)[0] for a, b in pairwise(ring)) / len(self.stages)

    def hop_seconds(self, sender: int, receiver: int, size: int) -> tuple[float, float]:
        """``size`` bytes from one place to another, at the pace of the slower port: (time that the
        link is occupied, latency after that)."""
        sent = self._profile(sender).link_seconds(size)
        received = self._profile(receiver).link_seconds(size)
        return max(sent[0], received[0]), max(sent[1], received[1])

    def compute_seconds(self, parallelism: Parallelism) -> Sequence[Callable[[int, int], float]]:
        """(rows, context) -> seconds: for each stage of a pipeline, or once for a group as a whole,
        which goes at the pace of its slowest device and shares the layers evenly."""
        places = range(1, len(self.stages) + 1)
        if parallelism == "pipeline":
            return [partial(self.stage_seconds, place) for place in places]
        distinct = {id(p): p for p in self.stages}.values()
        n = len(self.stages)
        return [lambda rows, context: max(tensor_seconds(p, parallelism, rows, n, context) for p in distinct)]

    def latency_seconds(self, rows: int, parallelism: Parallelism) -> float:
        """What a segment of ``rows`` rows takes from D0 through all stages to its tokens."""
        parts = self.compute_seconds(parallelism)
        hidden = rows * self.d0.model.hidden_width * self.d0.model.bytes_per_value
        following = [*range(2, len(parts) + 1), 0]  # to whom each part sends, the last one to D0
        hops = sum(sum(self.hop_seconds(place, receiver, hidden))
                   for place, receiver in enumerate(following, start=1))
        return sum(seconds(rows, 0) for seconds in parts) + hops + self.d0.verify_seconds(rows)

    def task_seconds(self, coordinator: Coordinator, task: Task) -> float:
        """What D0 takes for a piece of ``coordinator``'s work."""
        if isinstance(task, Verify):
            return self.d0.verify_seconds(len(task.output.numbers))
        kind = coordinator.strategy.drafts_with(coordinator.request.params)
        assert kind is not None
        return self.d0.draft_seconds(kind, len(task.request.nodes))

    def _profile(self, place: int) -> Profile:
        return self.stages[place - 1] if place else self.d0
