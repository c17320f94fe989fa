"""Whether the draft device keeps up with the stages.

A turn is one slot of the slowest stage, in which D0 processes one segment's output and makes at least one
draft pass (one level of the tree).  If that takes longer than the slot, the stages wait for D0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowspec_edge.boards.planning.planned_draft import level_seconds
from flowspec_edge.device_profile import Profile
from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import EAGLE2

_LEAST_S = 1e-3  # a turn is no shorter: messages and the links' latency take that long


@dataclass(frozen=True)
class DraftTurn:
    """D0's times in a slot, in seconds.

    output  lm_head, sampling and bookkeeping for a segment's rows
    draft   a pass of the draft head over one level of a tree, or a level's share of a block drafter's pass
    slot    a segment in the slowest stage, or over the slowest link if that takes longer
    on_cpu  whether the device is known to compute on its CPU
    """

    output: float
    draft: float
    slot: float
    on_cpu: bool = False

    @property
    def seconds(self) -> float:
        return self.output + self.draft

    @property
    def passes(self) -> int | None:
        """Draft passes that fit into a turn after the output; None (any number) if a pass takes no time."""
        return max(0, int((self.slot - self.output) / self.draft)) if self.draft else None

    @property
    def is_bottleneck(self) -> bool:
        """Whether the stages wait for D0, by times that count beside those of the messages between them."""
        return self.seconds > max(self.slot, _LEAST_S)

    def warning(self, name: str) -> str:
        if not self.is_bottleneck:
            return ""
        output, draft, turn, slot = (f"{1e3 * s:.3g}" for s in
                                     (self.output, self.draft, self.seconds, self.slot))
        return (f"the draft device {name} is the bottleneck: lm_head, sampling and bookkeeping ({output} ms) "
                f"and one draft pass ({draft} ms) take {turn} ms a turn, the slowest stage {slot} ms; let "
                f"{'it compute on its GPU (torch_device), or ' if self.on_cpu else ''}a faster board draft")

    def as_json(self) -> dict[str, Any]:
        return {"output_ms": round(self.output * 1e3, 6), "draft_pass_ms": round(self.draft * 1e3, 6),
                "turn_ms": round(self.seconds * 1e3, 6), "slot_ms": round(self.slot * 1e3, 6),
                "passes_a_turn": self.passes, "bottleneck": self.is_bottleneck}


def draft_turn(d0: Profile, slot: float, rows: int, kind: DraftKind = EAGLE2,
               torch_device: str = "") -> DraftTurn:
    """Return D0's times for segments of ``rows`` rows and trees of the default width, drafted by ``kind``.

    d0            scaled to the model and at the planned context
    slot          in seconds
    torch_device  "" is the profile's
    """
    from flowspec_edge.strategies.tree_strategy import TreeParameters

    measured = d0.conditions.device if d0.conditions else ""
    pass_s = level_seconds(d0, kind, TreeParameters().width)
    return DraftTurn(d0.verify_seconds(rows), pass_s, slot, (torch_device or measured).startswith("cpu"))


def device_mismatch(profile: Profile, torch_device: str) -> str:
    """Return why ``profile`` does not describe a board that computes on ``torch_device``; "" if it may."""
    measured = profile.conditions.device.partition(":")[0] if profile.conditions else ""
    device = torch_device.partition(":")[0]
    if not measured or measured == device:
        return ""
    return (f"profile {profile.name} is of a {measured} device, and torch_device is {torch_device!r}: "
            f"measure the board with flowspec device profile --device {device}")
