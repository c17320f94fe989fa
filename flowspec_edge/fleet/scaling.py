"""A board that was measured with one model, with another: what its profile says scaled by bytes.

Knows which figures follow from which bytes.  A scaled figure is an estimate and is called so; a
plan shows it.  Does not know plans.
"""

from __future__ import annotations

from flowspec_edge.config import ModelShape, Profile, StageCurve
from flowspec_edge.errors import UsageError
from flowspec_edge.fleet.memory import ModelBytes

_ALIKE = 0.01  # a layer whose bytes differ by no more is the same one


def scaled(profile: Profile, size: ModelBytes) -> tuple[Profile, str]:
    """``profile`` for the model of ``size``, and what was scaled: "" where it was measured with it.

    A layer takes time in the ratio of its bytes, what it adds for cached tokens in the ratio of the
    hidden width, and lm_head, the EAGLE head and SPD's module (two layers) by their bytes at the
    pace at which the board reads a layer.  The overhead of a segment, the pass of a small draft
    model, the link and the memory stay.

    UsageError if the model is another one and the profile does not say how large its layer is.
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
                f"{size.dtype}: give it layer_mb in [model], or measure with: flowspec device profile "
                "--model DIR")
        return profile.model_copy(update={"model": shape}), ""
    ratio = size.layer / 1e6 / measured.layer_mb
    if same_shape and abs(ratio - 1) <= _ALIKE and measured.bytes_per_value == size.bytes_per_value:
        return profile.model_copy(update={"model": shape}), ""
    wider = size.hidden_width / measured.hidden_width
    curve = profile.stage
    per_mb = curve.ms[0] / curve.layers / measured.layer_mb  # ms, for the rows that cost least
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
    """``profile`` as if ``context`` tokens were cached from the start, and no more ever."""
    curve = profile.stage
    if not curve.context_ms:
        return profile
    ms = [own + added * context / 1e3 for own, added in zip(curve.ms, curve.context_ms, strict=True)]
    return profile.model_copy(update={"stage": StageCurve(
        layers=curve.layers, rows=curve.rows, ms=ms, overhead_ms=curve.overhead_ms)})
