"""Scales a board's profile, measured with one model, to another model by the bytes of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowspec_edge.config import ModelShape, Profile, StageCurve
from flowspec_edge.errors import UsageError

if TYPE_CHECKING:
    from flowspec_edge.fleet.planning.model_size import ModelBytes

_TOLERANCE = 0.01  # layers whose bytes differ by no more count as equal


def scaled(profile: Profile, size: ModelBytes) -> tuple[Profile, str]:
    """The scaled profile and a description of the scaling, "" if it was measured with that model.

    A layer's time scales with its bytes, its time per cached token with the hidden width.  lm_head, EAGLE
    head and SPD's module (two layers) take their bytes at a layer's read rate.  A segment's overhead, a small
    draft model's pass, the link and the memory do not change.  UsageError without layer_mb for another model.
    """
    shape = ModelShape(layers=size.layers, hidden_width=size.hidden_width,
                       bytes_per_value=size.bytes_per_value, layer_mb=size.layer / 1e6)
    measured = profile.model
    same_shape = (measured.layers, measured.hidden_width) == (size.layers, size.hidden_width)
    if measured.layer_mb is None:
        if not same_shape or measured.bytes_per_value != size.bytes_per_value or size.dtype == "int4":
            raise UsageError(
                f"profile {profile.name} is for {measured.layers} layers of width {measured.hidden_width} "
                f"and does not say how large they are, so it cannot be scaled to {size.name} in "
                f"{size.dtype}: add layer_mb to its [model], or measure with: flowspec device profile "
                "--model DIR")
        return profile.model_copy(update={"model": shape}), ""
    ratio = size.layer / 1e6 / measured.layer_mb
    if same_shape and abs(ratio - 1) <= _TOLERANCE and measured.bytes_per_value == size.bytes_per_value:
        return profile.model_copy(update={"model": shape}), ""
    wider = size.hidden_width / measured.hidden_width
    curve = profile.stage
    per_mb = curve.ms[0] / curve.layers / measured.layer_mb  # ms, for the fewest rows of the curve
    stage = StageCurve(layers=curve.layers, rows=curve.rows, ms=[ms * ratio for ms in curve.ms],
                       context_ms=[ms * wider for ms in curve.context_ms], overhead_ms=curve.overhead_ms)
    head = size.lm_head / 1e6 * per_mb
    draft = profile.draft.model_copy(update={
        "pass_ms": size.draft / 1e6 * per_mb + head,
        "spd_pass_ms": 2 * size.layer / 1e6 * per_mb + head,
        "row_ms": profile.draft.row_ms * ratio,
    })
    own = profile.lm_head
    lm_head = own.model_copy(update={"ms": head, "row_ms": own.row_ms * (head / own.ms if own.ms else ratio)})
    update = {"model": shape, "stage": stage, "draft": draft, "lm_head": lm_head}
    return profile.model_copy(update=update), (
        f"scaled from layers of {measured.layer_mb:,.4g} MB and width {measured.hidden_width} "
        f"to {size.layer / 1e6:,.4g} MB and {size.hidden_width}")


def at_context(profile: Profile, context: int) -> Profile:
    curve = profile.stage
    if not curve.context_ms:
        return profile
    ms = [own + added * context / 1e3 for own, added in zip(curve.ms, curve.context_ms, strict=True)]
    return profile.model_copy(update={"stage": StageCurve(
        layers=curve.layers, rows=curve.rows, ms=ms, overhead_ms=curve.overhead_ms)})
