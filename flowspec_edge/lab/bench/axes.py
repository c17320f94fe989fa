"""The axes of sweeps: how each is named, and what a value of it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec_edge.device_profile import Profile
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.paper_results import BandwidthCurves, DepthCells, PaperResults
from flowspec_edge.strategies.params import Params, all_parameters
from flowspec_edge.util.terminal import did_you_mean

Scalar = int | float | str  # a text is the value of a parameter that is no number, such as "eagle2" or "true"
Value = Scalar | tuple[Scalar, Scalar]  # a pair on an axis with a grid
PaperFigures = BandwidthCurves | DepthCells


@dataclass(frozen=True)
class Axis:
    """What a sweep changes.

    unit       of a value
    title      in headings; ``label``: below a figure
    link       the field of a profile's link that a value sets
    fields     the strategies' parameters that it sets, a pair's one each
    grid       names of a pair's two values, "" if values are no pairs; ``grid_labels``: beside a figure
    replaces   the settings of a benchmark that say nothing in a sweep
    falls      whether points descend
    share      the name of the last value's tokens/s over the first one's; only on the link axes is the last
               value always the worst. "": values are texts, which have no order
    note       below the table
    published  the paper's figures, from a profile's name, stages and temperature
    """

    name: str
    unit: str
    title: str
    label: str = ""
    link: str = ""
    fields: tuple[str, ...] = ()
    grid: tuple[str, str] | None = None
    grid_labels: tuple[str, str] = ("", "")
    replaces: tuple[str, ...] = ()
    falls: bool = False
    share: str = "last/first"
    note: str = ""
    published: Callable[[PaperResults, str | None, int, float], PaperFigures | None] = lambda *_: None

    def params(self, params: Params, value: Value) -> Params:
        """Raise UsageError if the parameters are invalid at this value."""
        if not self.fields:
            return params
        values = value if isinstance(value, tuple) else (value,) * len(self.fields)
        parameters = all_parameters()
        settings: dict[str, Any] = {
            name: parameters[name].read(setting) if isinstance(setting, str) else setting
            for name, setting in zip(self.fields, values, strict=True)}
        return params.changed(**settings)

    def stages(self, stages: int, value: Value) -> int:
        return value if self.name == "stages" and isinstance(value, int) else stages

    def acceptance(self, share: float, value: Value) -> float:
        """Return ``CalibratedDrafter``'s share at ``value``."""
        return float(value) if self.name == "acceptance" and isinstance(value, int | float) else share

    def profile(self, profile: Profile, value: Value) -> Profile:
        if not self.link:
            return profile
        assert isinstance(value, int | float)
        return profile.with_link(**{self.link: float(value)})

    def __str__(self) -> str:
        return self.name

    def text(self, value: Value) -> str:
        """Write the value with its unit."""
        return f"{label(value)} {self.unit}".rstrip()


def label(value: Value) -> str:
    if isinstance(value, tuple):
        return f"({label(value[0])}, {label(value[1])})"
    return value if isinstance(value, str) else f"{value:g}"


AXES: dict[str, Axis] = {axis.name: axis for axis in (
    Axis("bandwidth", "Mbps", "link bandwidth", "link bandwidth (Mbps)", link="mbps", falls=True,
         share="kept", published=PaperResults.bandwidths),
    Axis("depth", "levels", "tree depths", fields=("depth", "expand_depth"), grid=("d0", "d_exp"),
         grid_labels=("levels of the initial tree (d0)", "levels of an expansion (d_exp)"),
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


def axis_named(name: str) -> Axis:
    """Return one of ``AXES``, or the axis of a strategy's parameter.

    Of two parameters, joined by a comma, the axis of their pairs. UsageError for any other name.
    """
    return AXES[name] if name in AXES else parameter_axis(name.split(","))


def parameter_axis(names: Sequence[str]) -> Axis:
    """Return the axis of one parameter of a strategy, or of two.

    UsageError for a name that no strategy declares, and for more than two.
    """
    parameters = all_parameters()
    for name in names:
        if name not in parameters:
            axis_names = [*AXES, *parameters]
            raise UsageError(f"no axis and no strategy's parameter {name!r}; {did_you_mean(name, axis_names)}"
                             f"the axes are {', '.join(AXES)}, and flowspec strategies NAME lists a "
                             "strategy's parameters")
    if len(names) > 2:
        raise UsageError(f"a sweep has one axis or two, not {len(names)}: {', '.join(names)}")
    fields, title = tuple(names), " and ".join(names)
    if len(names) == 2:
        return Axis(",".join(names), "", title, fields=fields, replaces=fields, grid=(names[0], names[1]),
                    grid_labels=(names[0], names[1]))
    is_numeric = parameters[names[0]].kind in (int, float)
    return Axis(names[0], "", title, title, fields=fields, replaces=fields,
                share="last/first" if is_numeric else "")
