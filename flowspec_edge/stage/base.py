"""The engine interface that a worker drives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flowspec_edge.messages import Cancel, Close, Open, Output, Prune, Segment, Tap

Results = tuple[list[Tap], Segment | Output]  # of a segment; an Output comes from the last stage
Poll = Callable[[], None]  # called between layers; it may receive messages


class Engine(Protocol):
    """One device's part of the model, as a state machine: messages in, messages out."""

    @property
    def counters(self) -> dict[str, float]:
        """Sums over all sessions since the last Open that found no other session."""

    def counters_of(self, session: int) -> dict[str, float]: ...

    @property
    def cache_bytes(self) -> int: ...

    @property
    def graph_sizes(self) -> int:
        """Numbers of rows for which the layers run as CUDA graphs."""

    def cached(self, session: int) -> int:
        """Rows in a session's cache."""

    def open(self, message: Open) -> None: ...

    def close(self, message: Close) -> None: ...

    def prune(self, message: Prune) -> None: ...

    def cancel(self, message: Cancel) -> None: ...

    def admit(self, segment: Segment) -> Segment | None: ...

    def compute(self, admitted: Sequence[Segment], poll: Poll | None = None) -> list[Results]:
        """One pass over the segments of a batch, each of another session."""
