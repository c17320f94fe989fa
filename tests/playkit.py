"""Playing what one stage is sent: segments, and control messages at any moment around each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from flowspec_edge.messages import Cancel, Close, Open, Output, Prune, Segment
from flowspec_edge.stage.engine import StageEngine

LAYERS = 4
STAGES = 2
Control = Open | Close | Prune | Cancel
SLOTS = 2 + LAYERS // STAGES  # a segment's moments: before it, between admit and compute, before each layer


@dataclass
class Step:
    """A segment, and what comes over the control channel around it."""

    segment: Segment
    slots: list[list[Control]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])


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


def play(engine: StageEngine, steps: list[Step], after: list[Control]) -> list[Segment | Output | None]:
    """What the stage makes of each segment; None for a stale one."""
    results: list[Segment | Output | None] = []
    for step in steps:
        slots = iter(step.slots)

        def deliver(slots: Iterator[list[Control]] = slots) -> None:
            for message in next(slots, []):
                tell(engine, message)

        deliver()
        admitted = engine.admit(step.segment)
        deliver()
        results.append(None if admitted is None else engine.compute([admitted], poll=deliver)[0][1])
        for _ in step.slots:  # what was left over because of fewer layers
            deliver()
    for message in after:
        tell(engine, message)
    return results


def passed_on(steps: list[Step], results: list[Segment | Output | None]
              ) -> tuple[list[Step], list[Control]]:
    """What the next stage gets: the segments that this one sent on, and all of the control messages."""
    found: list[Step] = []
    waiting: list[Control] = []
    for step, result in zip(steps, results, strict=True):
        if isinstance(result, Segment):
            found.append(Step(result, [waiting + step.slots[0], *step.slots[1:]]))
            waiting = []
        else:
            waiting = waiting + [message for slot in step.slots for message in slot]
    return found, waiting
