"""Playing what one stage is sent: passes, and control messages at any moment around each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st

from flowspec_edge.messages import Cancel, Close, Open, Output, Prune, Segment
from flowspec_edge.stage.engine import StageEngine

LAYERS = 4
STAGES = 2
Control = Open | Close | Prune | Cancel
SLOTS = 2 + LAYERS // STAGES  # a pass's moments: before it, between admit and compute, before each layer


@dataclass
class Step:
    """The segments of a pass, each of another session, and what comes over the control channel around it."""

    segments: list[Segment]
    slots: list[list[Control]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])


Results = list[Segment | Output | None]  # of a step's segments; None for a stale one


@st.composite
def passes(draw: st.DrawFn, segments: list[Segment]) -> list[Step]:
    """Steps for ``segments``, in order: neighbours of different sessions may share a pass."""
    steps: list[Step] = []
    for segment in segments:
        shares = steps and segment.session not in {other.session for other in steps[-1].segments}
        if shares and draw(st.sampled_from([True, True, False])):
            steps[-1].segments.append(segment)
        else:
            steps.append(Step([segment]))
    return steps


def during(steps: list[Step], session: int) -> list[int]:
    """The moments between layers of the passes with a segment of ``session``."""
    return [i * SLOTS + slot for i in places(steps, session) for slot in range(2, SLOTS)]


def places(steps: list[Step], session: int) -> list[int]:
    """Of the steps with a segment of ``session``."""
    return [i for i, step in enumerate(steps) if session in {segment.session for segment in step.segments}]


def tell(engine: StageEngine, message: Control) -> None:
    match message:
        case Open():
            engine.open(message)
        case Close():
            engine.close(message)
        case Prune():
            engine.prune(message)
        case Cancel():
            engine.cancel(message)


def play(engine: StageEngine, steps: list[Step], after: list[Control]) -> list[Results]:
    """The results of each step's segments."""
    played: list[Results] = []
    for step in steps:
        slots = iter(step.slots)

        def deliver(slots: Iterator[list[Control]] = slots) -> None:
            for message in next(slots, []):
                tell(engine, message)

        deliver()
        admitted = [engine.admit(segment) for segment in step.segments]
        deliver()
        running = [segment for segment in admitted if segment is not None]
        computed = iter(engine.compute(running, poll=deliver) if running else ())
        played.append([None if segment is None else next(computed)[1] for segment in admitted])
        for _ in step.slots:  # what was left over because of fewer layers
            deliver()
    for message in after:
        tell(engine, message)
    return played


def passed_on(steps: list[Step], played: list[Results]) -> tuple[list[Step], list[Control]]:
    """What the next stage gets: the segments that this one sent on, and all of the control messages."""
    following: list[Step] = []
    waiting: list[Control] = []
    for step, results in zip(steps, played, strict=True):
        segments = [result for result in results if isinstance(result, Segment)]
        if segments:
            following.append(Step(segments, [waiting + step.slots[0], *step.slots[1:]]))
            waiting = []
        else:
            waiting = waiting + [message for slot in step.slots for message in slot]
    return following, waiting
