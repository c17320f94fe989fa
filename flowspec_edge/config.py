"""Device and testbed profiles: how long things take, as data.

Knows the TOML format of a profile and the arithmetic of its curves.  Does not know who is charged
for what (``runtime``) nor how a profile was measured.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flowspec_edge.errors import UsageError
from flowspec_edge.resources import resource_dir

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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


class StageCurve(Strict):
    """What ``layers`` layers take for a segment of so many rows.

    ``rows`` and ``ms`` are the corners of a piecewise linear curve: flat below the first corner,
    and beyond the last as steep as the last piece.
    """

    layers: Positive
    rows: Annotated[list[Positive], Field(min_length=1)]
    ms: Annotated[list[Positive], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_a_curve(self) -> StageCurve:
        if len(self.rows) != len(self.ms):
            raise ValueError(f"rows and ms must be equally long, not {len(self.rows)} and {len(self.ms)}")
        if any(b <= a for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError("rows must increase")
        if any(b < a for a, b in zip(self.ms, self.ms[1:], strict=False)):
            raise ValueError("ms must not fall as rows grow")
        return self

    def milliseconds(self, rows: int) -> float:
        """The curve at ``rows``; nothing to compute costs nothing."""
        if rows <= 0:
            return 0.0
        if rows <= self.rows[0] or len(self.rows) == 1:
            return self.ms[0]
        right = min(bisect_right(self.rows, rows), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = self.ms[right - 1], self.ms[right]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


class DraftCost(Strict):
    """One forward pass of a draft model on D0, by kind: an EAGLE head, an ordinary small model,
    SPD's speculation module."""

    pass_ms: NotNegative
    lm_pass_ms: NotNegative
    spd_pass_ms: NotNegative


class LmHeadCost(Strict):
    """One application of lm_head to the rows of a segment on D0."""

    ms: NotNegative


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


class Profile(Strict):
    """A device or a testbed, in time."""

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

    def stage_seconds(self, rows: int, layers: float) -> float:
        """How long a stage of ``layers`` layers (a fraction is allowed) computes ``rows`` rows."""
        return self.stage.milliseconds(rows) * 1e-3 * (layers / self.stage.layers)

    def draft_seconds(self, kind: str) -> float:
        """One pass of a draft model of this kind: "eagle2", "lm" or "spd"."""
        costs = {"eagle2": self.draft.pass_ms, "lm": self.draft.lm_pass_ms, "spd": self.draft.spd_pass_ms}
        return costs[kind] * 1e-3

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


M = TypeVar("M", bound=BaseModel)


def load_toml(path: Path, model: type[M]) -> M:
    """``path`` as a ``model``; every fault is one :class:`UsageError` that names file and key."""
    try:
        with path.open("rb") as file:
            data: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{path}: " + "; ".join(map(_fault, error.errors()))) from error


def _fault(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}"
    if error["type"] == "missing":
        return f"missing key {key!r}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{key}: {message[:1].lower()}{message[1:]}"
