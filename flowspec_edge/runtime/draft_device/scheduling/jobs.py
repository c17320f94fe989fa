"""D0's work for one or several requests, whose matrix products are computed together.

An lm_head or draft head takes about as long as reading its weights, however many rows it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flowspec_edge.drafting.tree_drafter import TreeDrafter
from flowspec_edge.runtime.draft_device.coordinator import Coordinator, DraftPass, Task, Verify

Failure = tuple[Coordinator, Exception]


@dataclass(frozen=True)
class Job:
    """``parts``: outputs to verify, or draft passes of drafters that can share one; one part a request."""

    parts: tuple[tuple[Coordinator, Task], ...]

    @property
    def is_draft(self) -> bool:
        return isinstance(self.parts[0][1], DraftPass)

    @property
    def sessions(self) -> tuple[int, ...]:
        return tuple(coordinator.builder.session for coordinator, _ in self.parts)

    def without(self, sessions: Sequence[int]) -> Job | None:
        """The job for the other requests, if there are any."""
        parts = tuple(part for part in self.parts if part[0].builder.session not in sessions)
        return Job(parts) if parts else None

    def complete(self) -> list[Failure]:
        """Do the work; return the requests that failed, with their errors. An error in a request's own
        strategy, drafter or sampling fails this request alone, an error in the common work fails all."""
        try:
            if len(self.parts) > 1:
                return self._draft() if self.is_draft else self._verify()
            [(coordinator, task)] = self.parts
            coordinator.complete(task)
            return []
        except Exception as error:
            return [(coordinator, error) for coordinator, _ in self.parts]

    def _verify(self) -> list[Failure]:
        failures: list[Failure] = []
        begun: list[tuple[Coordinator, Tensor, Callable[[Tensor], None]]] = []
        for coordinator, task in self.parts:
            try:
                assert isinstance(task, Verify)
                begun.append((coordinator, *coordinator.begin(task)))
            except Exception as error:
                failures.append((coordinator, error))
        if begun:
            states = [rows for _, rows, _ in begun]
            logits = begun[0][0].head.logits(torch.cat(states)).split([len(rows) for rows in states])
            failures += _each((coordinator, partial(verified, rows))
                              for (coordinator, _, verified), rows in zip(begun, logits, strict=True))
        return failures

    def _draft(self) -> list[Failure]:
        asked = [(coordinator, coordinator.drafter, task.request) for coordinator, task in self.parts
                 if isinstance(task, DraftPass) and isinstance(coordinator.drafter, TreeDrafter)]
        assert len(asked) == len(self.parts)
        outputs = TreeDrafter.expand_together([(drafter, request) for _, drafter, request in asked])
        return _each((coordinator, partial(coordinator.drafted, request, output))
                     for (coordinator, _, request), output in zip(asked, outputs, strict=True))


def can_share(first: Coordinator, other: Coordinator) -> bool:
    """Whether one pass can serve both drafters."""
    return (isinstance(first.drafter, TreeDrafter) and other.drafter is not None
            and first.drafter.shares_passes_with(other.drafter))


def _each(steps: Iterable[tuple[Coordinator, Callable[[], None]]]) -> list[Failure]:
    failures: list[Failure] = []
    for coordinator, step in steps:
        try:
            step()
        except Exception as error:
            failures.append((coordinator, error))
    return failures
