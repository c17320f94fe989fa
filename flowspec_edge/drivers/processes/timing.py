"""Durations of a slot, of a row on a link and of a draft pass: measured at the start, or emulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from flowspec_edge.d0.prompt_chunks import USUAL, PromptCurve
from flowspec_edge.d0.request import Request, Stats
from flowspec_edge.d0.slot_curve import WARM_UP_ROWS, SlotCurve
from flowspec_edge.drivers.processes.emulator import Emulator
from flowspec_edge.errors import RequestFailed, UsageError
from flowspec_edge.strategies.params import Params

_SEGMENTS = 6
_PASSES = 2  # of each size of a prompt's segments; the fastest counts
_ROUND_TRIPS = 3  # per segment size, to measure links; the fastest counts


class ClusterTiming:
    """The times of a cluster's segments.

    slot_s  time of a full segment in the slowest stage; 0 before :meth:`warm_up`
    curve   learns a segment's time from its rows; None under emulation, which takes it from the profile
    sparse  whether rows choose experts, by the emulated model if there is one
    """

    def __init__(self, emulator: Emulator | None, stages: int, pass_seconds: Callable[[str], float],
                 sparse: bool = False) -> None:
        self.slot_s = 0.0
        self.sparse = emulator.sparse if emulator else sparse
        self.curve = None if emulator else SlotCurve(sparse)
        self._emulator = emulator
        self._stages = stages
        self._pass_seconds = pass_seconds
        self._pass_s: dict[str, float] = {}
        self._prompts: PromptCurve | None = None

    def slot_seconds(self) -> Callable[[int], float] | None:
        """Return a function from rows to a segment's seconds in a stage; None if it is not known."""
        if self._emulator:
            return self._emulator.slot_seconds
        return self.curve.seconds if self.curve else None

    def prompt_curve(self, most: int) -> PromptCurve | None:
        """Return the times by which prompts are cut into segments of at most ``most`` rows; None if they are not known.

        They are what the stages take now.  What is emulated does not depend on the stages' own memory.
        """
        if self._emulator:
            return PromptCurve(self._emulator.prompt_seconds, self._emulator.most_prompt_rows)
        return self._prompts and replace(self._prompts, most=min(self._prompts.most, most))

    def draft_passes(self, kind: str, rows: int) -> float:
        """Return how many draft passes fit into the time of ``rows`` rows through all stages."""
        if self._emulator:
            return self._emulator.draft_passes(kind, rows)
        if kind not in self._pass_s:
            self._pass_s[kind] = self._pass_seconds(kind)
        return self.slot_s * self._stages / self._pass_s[kind]

    def warm_up(self, run: Callable[[Request], Stats], most: int = USUAL) -> None:
        """Measure the slot with full segments, so that all strategies use the same unit of turns.

        Also seed the curve with the shortest and longest warm-up segments; the difference of their round trips
        gives a row's mean time on a link.

        Stages that take more than the usual rows of a prompt at once, ``most``, are timed with them, once: prompts are
        cut alike for every request from then on, so that all strategies compute a prompt with the same products.
        """
        slot_s = run(_prefill(Params().segment, _SEGMENTS)).slot_s
        if self.curve:
            shortest, longest = min(WARM_UP_ROWS), max(WARM_UP_ROWS)
            short_s, long_s = (min(_transit_s(run, rows) for _ in range(_ROUND_TRIPS))
                               for rows in (shortest, longest))
            self.curve.link_row_s = max(0.0, long_s - short_s) / (longest - shortest) / self._stages
        self.slot_s = slot_s
        if self.curve and most > USUAL:
            self._prompts = _measured(run, most)


def _measured(run: Callable[[Request], Stats], most: int) -> PromptCurve | None:
    """Segments of the usual rows and of more, until the model takes no longer text."""
    times: dict[int, float] = {}
    rows = min(WARM_UP_ROWS[0], USUAL)
    while rows <= most:
        try:
            passes = [run(_prefill(rows, 1)).stages for _ in range(_PASSES)]
        except (UsageError, RequestFailed):  # too long a text, or too little memory for so many rows
            break
        least = min(max(stage.get("compute_s", 0.0) for stage in stages) for stages in passes)
        times[rows] = max(least, *times.values(), 0.0)  # a larger segment takes no less time
        rows *= 2
    if not times:
        return None
    sizes, seconds = list(times), list(times.values())
    return PromptCurve(lambda rows, context: float(np.interp(rows, sizes, seconds)), sizes[-1])


def _transit_s(run: Callable[[Request], Stats], rows: int) -> float:
    """Seconds for a segment of ``rows`` rows from D0 back to D0, minus the stages' computing."""
    stats = run(_prefill(rows, 1))
    return stats.ttft_s - sum(stage.get("compute_s", 0.0) for stage in stats.stages)


def _prefill(rows: int, segments: int) -> Request:
    return Request([0] * (rows * segments), "autoregressive", 1, params=Params(prefill_chunk=rows))
