"""Scales a board's profile, measured with one model, to another model by the bytes of its parts.

int4 weights need their kernel's times (``[int4]`` of a profile).  Without them a stage is charged for the
memory bandwidth that the profile states, which other engines reach.  A pass reads the keys and values of the
whole context once, and each of its rows multiplies with all of them: a profile without measured times for that
(``context_ms``) is charged the cache's bytes at its memory's bandwidth, or the multiplications at the rate of its
matrix products if they take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from flowspec_edge.device_profile import ModelShape, Profile, StageCurve
from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kinds import timed_kinds
from flowspec_edge.model.expert_counts import correlated

if TYPE_CHECKING:
    from flowspec_edge.boards.planning.model_size import ModelBytes
    from flowspec_edge.model.manifest import HeadBits

# Of a stage's times: the profile's own kind of weights; the profile's int4 kernel; bytes over bandwidth.
Basis = Literal["profile", "kernel", "bandwidth"]
_TOLERANCE = 0.01  # layers whose bytes differ by no more count as equal
_SPARSE_ROWS = {1, 2, 4, 8, 16, 32}  # corners of the curve of a model with experts, which is steepest there
_INT4_ROWS = 16  # for which PyTorch's int4 kernel reads the weights once
_INT4_BYTES = 0.5 + 4 / 128  # a weight of the measured products, with its share of a scale and a zero


@dataclass(frozen=True)
class Scaling:
    """How a profile was scaled: ``note`` is "" if it was measured with that model."""

    note: str = ""
    basis: Basis = "profile"


def scaled(profile: Profile, size: ModelBytes) -> tuple[Profile, Scaling]:
    """Scale a profile to another model.

    A layer's time scales with the bytes that a pass reads of it: with experts, those that as many rows touch,
    which choose them independently (``ms``) or alike (``shared_ms``); what it reads of a recurrent state
    comes at the memory's bandwidth.  Its time per cached token scales with the hidden width.  lm_head, EAGLE
    head and the layers of kinds with a time of their own take their bytes at a layer's read rate.  A segment's
    overhead, a small draft model's pass, the price of a launch, the link and the memory do not change.

    Raise UsageError without layer_mb for another model.
    """
    fitted, scaling = _scaled(profile, size)
    curve = fitted.stage
    if not curve.context_ms:
        curve = _with_attention(curve, profile, size)
    if scaling.note and (state_ms := curve.layers * 1e3 * cache_seconds(profile, size.state_read, 1)):
        curve = curve.model_copy(update={"ms": [ms + state_ms for ms in curve.ms],
                                         "shared_ms": [ms + state_ms for ms in curve.shared_ms]})
    launch = fitted.launch and fitted.launch.model_copy(update={
        "layer": size.layer_launches, "experts": size.experts or None, "chosen": size.experts_per_token or None})
    return fitted.model_copy(update={"stage": curve, "launch": launch}), scaling


def _with_attention(curve: StageCurve, profile: Profile, size: ModelBytes) -> StageCurve:
    """Return ``curve`` with the time that a thousand cached tokens add."""
    read_bytes = round(size.kv_row * (1 - size.windowed))  # a window's time does not grow with the text
    reading = curve.layers * 1e3 * cache_seconds(profile, read_bytes, 1000)
    if not reading:
        return curve
    # Queries times keys, and weights times values.
    by_row = curve.layers * 1000 * 2 * size.queries * _product_ms(profile)
    bound = reading / by_row if by_row else 0.0  # rows from which multiplying takes longer than reading
    # The last two corners say how the curve goes on.
    corners = sorted({*curve.rows, *((bound, 2 * max(bound, curve.rows[-1])) if bound else ())})

    def at_corners(times: list[float]) -> list[float]:
        times_of_rows = dict(zip(curve.rows, times, strict=False))
        rows_curve = StageCurve(layers=curve.layers, rows=curve.rows, ms=times) if times else None
        return [times_of_rows.get(n, rows_curve.milliseconds(n)) for n in corners] if rows_curve else []

    return curve.model_copy(update={
        "rows": corners, "ms": at_corners(curve.ms), "shared_ms": at_corners(curve.shared_ms),
        "context_ms": [max(reading, by_row * n) for n in corners]})


def _product_ms(profile: Profile) -> float:
    """Return the time of a multiplication in the profile's matrix products of many rows.

    0 if the time is not known, as from a curve that does not rise.
    """
    curve, measured = profile.stage, profile.model
    if not curve.rises or curve.shared_ms or not measured.layer_mb:
        return 0.0
    by_row = (curve.ms[-1] - curve.ms[-2]) / (curve.rows[-1] - curve.rows[-2]) / curve.layers
    weights = measured.layer_mb * 1e6 / (_INT4_BYTES if measured.quantised else measured.bytes_per_value)
    return by_row / weights


def cache_seconds(profile: Profile, row: int, context: int) -> float:
    """Return the seconds to read ``context`` cached rows of ``row`` bytes.

    0 for a profile without the memory's bandwidth.
    """
    rate = profile.memory.gb_per_s if profile.memory else None
    return row * context / (rate * 1e9) if rate else 0.0


def _scaled(profile: Profile, size: ModelBytes) -> tuple[Profile, Scaling]:
    shape = ModelShape(layers=size.layers, hidden_width=size.hidden_width,
                       bytes_per_value=size.bytes_per_value, layer_mb=size.layer / 1e6,
                       quantised=size.dtype == "int4")
    measured = profile.model
    same_shape = (measured.layers, measured.hidden_width) == (size.layers, size.hidden_width)
    other_bits = measured.quantised != shape.quantised
    if measured.layer_mb is None:
        if not same_shape or measured.bytes_per_value != size.bytes_per_value or other_bits:
            raise UsageError(
                f"profile {profile.name} is for {measured.layers} layers of width {measured.hidden_width} "
                f"and does not say how large they are, so it cannot be scaled to {size.name} in "
                f"{size.dtype}: add layer_mb to its [model], or measure with: flowspec device profile "
                "--model DIR")
        return profile.model_copy(update={"model": shape}), Scaling()
    same_bytes = abs(size.layer / 1e6 / measured.layer_mb - 1) <= _TOLERANCE
    if same_shape and same_bytes and measured.bytes_per_value == size.bytes_per_value and not other_bits:
        return profile.model_copy(update={"model": shape}), Scaling()
    per_mb, ratio = _read_ms(profile), size.layer_read(1) / 1e6 / measured.layer_mb
    stage, basis = _stage(profile, size)
    d0_per_mb = weight_read_ms(profile, size.head_bits)
    head = size.lm_head / 1e6 * d0_per_mb
    passes = size.planned.kind.passes  # as ``Profile.draft_seconds`` counts
    draft = profile.draft.model_copy(update={
        "pass_ms": (size.draft - size.draft_unread + size.draft_lm_head) / 1e6 * d0_per_mb / passes,
        **{kind.charged_as: kind.layers * size.layer_read(1) / 1e6 * per_mb + head for kind in timed_kinds()},
        "row_ms": profile.draft.row_ms * ratio,
    })
    profile_head = profile.lm_head
    head_ratio = head / profile_head.ms if profile_head.ms else ratio
    lm_head = profile_head.model_copy(update={"ms": head, "row_ms": profile_head.row_ms * head_ratio})
    update = {"model": shape, "stage": stage, "draft": draft, "lm_head": lm_head}
    return profile.model_copy(update=update), Scaling(
        f"scaled from layers of {measured.layer_mb:,.4g} MB and width {measured.hidden_width} "
        f"to {size.layer / 1e6:,.4g} MB and {size.hidden_width}"
        + (f", of which 1 row reads {size.layer_read(1) / 1e6:,.4g} MB" if size.experts else ""), basis)


def weight_read_ms(profile: Profile, bits: HeadBits) -> float:
    """Return the time to read 10^6 bytes of a head's weights of these bits, with the rows of a segment."""
    per_mb = _read_ms(profile)
    return per_mb if bits == "16bit" else _read_quantised_ms(profile, per_mb)


def _read_ms(profile: Profile) -> float:
    """Return the time to read 10^6 bytes of weights in 16 bits."""
    if profile.model.quantised and profile.memory and profile.memory.gb_per_s:
        return 1 / profile.memory.gb_per_s
    assert profile.model.layer_mb
    return profile.stage.ms[0] / profile.stage.layers / profile.model.layer_mb


def _read_quantised_ms(profile: Profile, per_mb: float) -> float:
    """Return the time for 10^6 bytes of int4 weights and a segment's rows; int8 is two of its products."""
    measured, kernel = profile.model, profile.int4
    if measured.quantised:
        assert measured.layer_mb
        return profile.stage.milliseconds(_INT4_ROWS) / profile.stage.layers / measured.layer_mb
    return per_mb * kernel.ratio(_INT4_ROWS) * measured.bytes_per_value / _INT4_BYTES if kernel else per_mb


def _stage(profile: Profile, size: ModelBytes) -> tuple[StageCurve, Basis]:
    measured, curve, kernel = profile.model, profile.stage, profile.int4
    assert measured.layer_mb
    rows = set(curve.rows) | (_SPARSE_ROWS if size.experts else set())
    basis: Basis = "profile"
    if size.dtype == "int4" and not measured.quantised:
        basis = "kernel" if kernel else "bandwidth"
        rows |= set(kernel.rows) if kernel else {_INT4_ROWS, *_expanded_corners(profile)}
    elif measured.quantised and size.dtype != "int4":
        basis = "bandwidth"
    corners = sorted(rows)
    # A sparse layer's time goes from that of independent rows to that of rows which choose the same experts.
    ms, *shared = [_layer_ms(profile, size, basis, corners, correlation)
                   for correlation in ((0.0, 1.0) if size.experts else (0.0,))]
    wider = size.hidden_width / measured.hidden_width
    context_ms = [(curve.milliseconds(n, 1000) - curve.milliseconds(n)) * wider for n in corners]
    return StageCurve(layers=curve.layers, rows=corners, ms=list(accumulate(ms, max)),
                      context_ms=list(accumulate(context_ms, max)) if curve.context_ms else [],
                      overhead_ms=curve.overhead_ms, correlation=curve.correlation,
                      shared_ms=list(accumulate(shared[0], max)) if shared else []), basis


def _layer_ms(profile: Profile, size: ModelBytes, basis: Basis, corners: Sequence[float], correlation: float
              ) -> list[float]:
    """Return the milliseconds of the profile's layers, by rows."""
    measured, curve, kernel = profile.model, profile.stage, profile.int4
    assert measured.layer_mb
    by_bytes = {n: size.layer_read(n, correlation) / 1e6 / measured.layer_mb for n in corners}
    if basis == "kernel":
        assert kernel
        full = measured.bytes_per_value / _INT4_BYTES  # bytes in 16 bits that are measured beside one of int4
        last = curve.rows[-1]  # beyond the rows that a stage was measured with, it grows at least as its products
        curve_ms = {n: max(curve.milliseconds(n), curve.milliseconds(min(n, last)) * kernel.full(max(n, last))
                           / kernel.full(last)) for n in corners}
        return [curve_ms[n] * by_bytes[n] * full * kernel.ratio(n) for n in corners]
    if basis == "bandwidth" and size.dtype == "int4" and size.experts:
        return [curve.milliseconds(n) * _read_in_all(size, n, correlation) / 1e6 / measured.layer_mb
                for n in corners]
    if basis == "bandwidth" and size.dtype == "int4":
        # The kernel reads the weights again for every 16 rows.  For many they are read once, written in 16 bits, and
        # multiplied (``stage.quant.expanded``).
        full = measured.bytes_per_value / _INT4_BYTES
        return [by_bytes[n] * min(max(curve.milliseconds(n), curve.ms[0] * n / _INT4_ROWS),
                                  curve.ms[0] * (1 + full) + curve.milliseconds(n) * full) for n in corners]
    return [curve.milliseconds(n) * by_bytes[n] for n in corners]


def _expanded_corners(profile: Profile) -> set[float]:
    """Return the rows from which on int4 weights are expanded, where the profile's own take one time for so many."""
    return {_INT4_ROWS * (1 + 2 * profile.model.bytes_per_value / _INT4_BYTES)}


def _read_in_all(size: ModelBytes, rows: float, correlation: float) -> float:
    """Return the bytes of a layer if every matrix is read once for 16 of the rows that it multiplies."""
    touched = correlated(size.experts, size.experts_per_token, rows, correlation)
    dense = size.layer - size.expert * size.experts
    return (dense * max(1.0, rows / _INT4_ROWS)
            + size.expert * touched * max(1.0, rows * size.experts_per_token / touched / _INT4_ROWS))


def at_context(profile: Profile, size: ModelBytes, context: int) -> Profile:
    """Return a scaled profile whose passes all read ``context`` cached tokens.

    That concerns the stages, the EAGLE head, and the kinds of draft model with a time of their own.
    """
    curve, draft = profile.stage, profile.draft

    def with_cache(times: list[float]) -> list[float]:
        if not curve.context_ms:
            return times
        return [base + per_thousand * context / 1e3 for base, per_thousand in zip(times, curve.context_ms, strict=True)]

    draft = draft.model_copy(update={
        "pass_ms": draft.pass_ms + 1e3 * cache_seconds(profile, size.draft_kv_row, context),
        **{kind.charged_as: profile.pass_ms(kind) + 1e3 * cache_seconds(profile, kind.layers * size.kv_row, context)
           for kind in timed_kinds()}})
    return profile.model_copy(update={"draft": draft, "stage": StageCurve(
        layers=curve.layers, rows=curve.rows, ms=with_cache(curve.ms), overhead_ms=curve.overhead_ms,
        shared_ms=with_cache(curve.shared_ms) if curve.shared_ms else [], correlation=curve.correlation)})
