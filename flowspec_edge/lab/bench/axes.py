"""The axes of sweeps: how each is named, and what a value of it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from flowspec_edge.device_profile import Profile
from flowspec_edge.lab.bench.paper_results import BandwidthCurves, DepthCells, PaperResults
from flowspec_edge.strategies.params import Params

AxisName = Literal["bandwidth", "depth", "stages", "segment", "latency", "acceptance"]
Value = int | float | tuple[int, int]  # a pair (d0, d_exp) on the axis "depth"
PaperFigures = BandwidthCurves | DepthCells


@dataclass(frozen=True)
class Axis:
    """unit       of a value
    title      in headings; ``label``: below a figure
    link       the field of a profile's link that a value sets
    fields     the strategies' parameters that it sets, a pair's one each
    replaces   the settings of a benchmark that say nothing in a sweep
    falls      whether points descend
    share      the name of the last value's tokens/s over the first one's; only on the link axes is the last
               value always the worst
    note       below the table
    published  the paper's figures, from a profile's name, stages and temperature
    """

    name: AxisName
    unit: str
    title: str
    label: str = ""
    link: str = ""
    fields: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    falls: bool = False
    share: str = "last/first"
    note: str = ""
    published: Callable[[PaperResults, str | None, int, float], PaperFigures | None] = lambda *_: None

    def params(self, params: Params, value: Value) -> Params:
        """UsageError if the parameters are invalid at this value."""
        if not self.fields:
            return params
        values = value if isinstance(value, tuple) else (value,) * len(self.fields)
        settings: dict[str, Any] = dict(zip(self.fields, values, strict=True))
        return params.changed(**settings)

    def stages(self, stages: int, value: Value) -> int:
        return value if self.name == "stages" and isinstance(value, int) else stages

    def acceptance(self, share: float, value: Value) -> float:
        """``CalibratedDrafter``'s share."""
        return float(value) if self.name == "acceptance" and not isinstance(value, tuple) else share

    def profile(self, profile: Profile, value: Value) -> Profile:
        if not self.link:
            return profile
        assert not isinstance(value, tuple)
        return profile.with_link(**{self.link: float(value)})

    def __str__(self) -> str:
        return self.name

    def text(self, value: Value) -> str:
        """With its unit."""
        return f"{label(value)} {self.unit}"


def label(value: Value) -> str:
    return f"({value[0]}, {value[1]})" if isinstance(value, tuple) else f"{value:g}"


AXES: dict[AxisName, Axis] = {axis.name: axis for axis in (
    Axis("bandwidth", "Mbps", "link bandwidth", "link bandwidth (Mbps)", link="mbps", falls=True,
         share="kept", published=PaperResults.bandwidths),
    Axis("depth", "levels", "tree depths", fields=("depth", "expand_depth"),
         replaces=("depth", "expand_depth"),
         published=lambda paper, profile, stages, temperature: paper.depths(profile, stages)),
    Axis("stages", "stages", "stages", "stages", replaces=("stages",),
         note="The profile's model keeps its number of layers: more stages hold fewer layers each."),
    Axis("segment", "rows", "segment length", "longest segment (rows)", fields=("segment", "plus_rows"),
         replaces=("segment",)),
    Axis("latency", "ms", "link latency", "link latency, one way (ms)", link="latency_ms", share="kept"),
    Axis("acceptance", "× head", "acceptance", "acceptance (1: the head's, 2: a perfect draft's)",
         replaces=("acceptance",),
         note="From 1 to 2: the right token comes first at so many more of the positions. Of chain's tokens, "
              "1 - 1/ALR are its draft's first choice."),
)}
