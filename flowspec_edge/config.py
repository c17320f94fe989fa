"""Device and testbed profiles: how long things take, as data.

Knows the TOML format of a profile and the arithmetic of its curves.  Does not know who is charged
for what (``runtime``) nor how a profile was measured.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flowspec_edge.errors import UsageError
from flowspec_edge.resources import resource_dir
from flowspec_edge.tomlfile import load_toml as load_toml

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """Frozen; a key that is not a field is an error, and so is a value of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelShape(Strict):
    """The model whose costs a profile charges."""

    layers: Count
    hidden_width: Count
    bytes_per_value: Count  # of a hidden state on the wire
    layer_mb: Positive | None = None  # 10^6 bytes of weights that one layer reads, as the device holds them


class StageCurve(Strict):
    """What a stage takes for a segment of so many rows, each of which sees so much context.

    ``rows`` and ``ms`` are the corners of a piecewise linear curve for ``layers`` layers and an
    empty cache: flat below the first corner, and beyond the last as steep as the last piece.
    ``context_ms`` is what 1000 cached tokens add at each corner, by the same rule; ``overhead_ms``
    comes with every segment, however many layers the stage has.
    """

    layers: Positive
    rows: Annotated[list[Positive], Field(min_length=1)]
    ms: Annotated[list[Positive], Field(min_length=1)]
    context_ms: list[NotNegative] = []
    overhead_ms: NotNegative = 0.0

    @model_validator(mode="after")
    def _is_a_curve(self) -> StageCurve:
        if len(self.rows) != len(self.ms):
            raise ValueError(f"rows and ms must be equally long, not {len(self.rows)} and {len(self.ms)}")
        if self.context_ms and len(self.context_ms) != len(self.rows):
            raise ValueError("rows and context_ms must be equally long, "
                             f"not {len(self.rows)} and {len(self.context_ms)}")
        if any(b <= a for a, b in pairwise(self.rows)):
            raise ValueError("rows must increase")
        for name in ("ms", "context_ms"):
            values = getattr(self, name)
            if any(b < a for a, b in pairwise(values)):
                raise ValueError(f"{name} must not fall as rows grow")
        return self

    def milliseconds(self, rows: int, context: int = 0) -> float:
        """The curve at ``rows``, without the overhead; nothing to compute costs nothing."""
        if rows <= 0:
            return 0.0
        seen = self._at(self.context_ms, rows) * context / 1e3 if self.context_ms else 0.0
        return self._at(self.ms, rows) + seen

    def _at(self, values: list[float], rows: int) -> float:
        if rows <= self.rows[0] or len(self.rows) == 1:
            return values[0]
        right = min(bisect_right(self.rows, rows), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = values[right - 1], values[right]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


class DraftCost(Strict):
    """One forward pass of a draft model on D0, by kind: an EAGLE head, an ordinary small model,
    SPD's speculation module; and what each node that it expands adds, whatever the kind."""

    pass_ms: NotNegative
    lm_pass_ms: NotNegative
    spd_pass_ms: NotNegative
    row_ms: NotNegative = 0.0


class LmHeadCost(Strict):
    """One application of lm_head to the rows of a segment on D0, and what each row adds to D0's work."""

    ms: NotNegative
    row_ms: NotNegative = 0.0


class Link(Strict):
    """The link between two neighbours, one way."""

    mbps: Positive  # 10^6 bits a second
    latency_ms: NotNegative


class Collective(Strict):
    """What tensor parallelism pays beside the bytes."""

    step_ms: NotNegative = 0.0  # a step of a ring: every device sends to the next one and waits


class Host(Strict):
    """D0's own bookkeeping for one output: walk, prune, merge, segment, encode."""

    bookkeeping_ms: NotNegative = 0.0


class Memory(Strict):
    """A board's memory, in MB (10^6 bytes)."""

    total_mb: Positive
    usable_mb: Positive  # free for a stage's or D0's process, with the system running
    process_mb: NotNegative  # what such a process takes beside weights and cache: interpreter, kernels
    gb_per_s: Positive | None = None  # 10^9 bytes a second that a large copy reads

    @model_validator(mode="after")
    def _fits(self) -> Memory:
        if self.usable_mb > self.total_mb:
            raise ValueError(f"usable_mb {self.usable_mb:g} is more than total_mb {self.total_mb:g}")
        return self


class Conditions(Strict):
    """Under what a profile was measured; informative, nothing is computed from it."""

    date: str = ""
    machine: str = ""
    model: str = ""
    dtype: str = ""
    device: str = ""
    threads: Annotated[int, Field(ge=0)] = 0
    power_mode: str = ""
    temperature_c: float | None = None  # the hottest zone, when the measuring ended
    clocks_mhz: dict[str, float] = {}
    peer: str = ""  # what the link was measured with


class Profile(Strict):
    """A device or a testbed, in time and memory."""

    name: str
    summary: str
    kind: Literal["testbed", "device"]
    provenance: Literal["measured", "published", "estimated"]
    source: str
    model: ModelShape
    stage: StageCurve
    draft: DraftCost
    lm_head: LmHeadCost
    link: Link
    host: Host = Host()
    collective: Collective = Collective()
    memory: Memory | None = None
    conditions: Conditions | None = None

    def stage_seconds(self, rows: int, layers: float, context: int = 0) -> float:
        """How long a stage of ``layers`` layers (a fraction is allowed) computes ``rows`` rows, with
        ``context`` tokens in its cache."""
        if rows <= 0:
            return 0.0
        share = layers / self.stage.layers
        return (self.stage.overhead_ms + self.stage.milliseconds(rows, context) * share) * 1e-3

    def draft_seconds(self, kind: str, nodes: int = 1) -> float:
        """One pass of a draft model of this kind (``modeldir.DRAFT_PARTS``, or "ngram", which looks
        up and computes nothing) that expands ``nodes``; every EAGLE head costs what an EAGLE-2 head does."""
        eagle = self.draft.pass_ms
        costs = {"eagle2": eagle, "eagle2-deep": eagle, "eagle3": eagle, "lm": self.draft.lm_pass_ms,
                 "spd": self.draft.spd_pass_ms, "ngram": 0.0}
        return (costs[kind] + self.draft.row_ms * nodes) * 1e-3

    def verify_seconds(self, rows: int) -> float:
        """What D0 takes for an output: bookkeeping, and lm_head if it has rows."""
        head = self.lm_head.ms + self.lm_head.row_ms * rows if rows else 0.0
        return (self.host.bookkeeping_ms + head) * 1e-3

    def link_seconds(self, size: int) -> tuple[float, float]:
        """``size`` bytes over one link: (time the sender's link is occupied, latency after that)."""
        return size * 8 / (self.link.mbps * 1e6), self.link.latency_ms * 1e-3


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.stem for path in resource_dir("profiles").glob("*.toml"))


def load_profile(name_or_path: str) -> Profile:
    """A profile that comes with the package, by name, or any TOML file, by path."""
    if name_or_path in profile_names():
        path = resource_dir("profiles") / f"{name_or_path}.toml"
    elif name_or_path.endswith(".toml") or "/" in name_or_path:
        path = Path(name_or_path)
    else:
        raise UsageError(f"no profile {name_or_path!r}; there are {', '.join(profile_names())}, "
                         "or give the path of a .toml file")
    return load_toml(path, Profile)
