"""What a worker runs: the contract of ``stage.engine.StageEngine``, ``stage.tensor_engine.TensorEngine``
and the emulation round either."""

from __future__ import annotations

from typing import Protocol

from flowspec_edge.messages import Cancel, Close, Open, Output, Prune, Segment, Tap


class Poll(Protocol):
    """What an engine calls between layers; it may listen for up to ``wait`` seconds before it returns."""

    def __call__(self, wait: float = 0.0) -> None: ...


class Engine(Protocol):
    """One device's part of the model, as a state machine: messages in, messages out."""

    @property
    def counters(self) -> dict[str, float]:
        """Of all sessions since one was opened that had no other beside it."""

    def counters_of(self, session: int) -> dict[str, float]:
        """An open session's own."""

    @property
    def cache_bytes(self) -> int:
        """Bytes that caches take."""

    def cached(self, session: int) -> int:
        """Rows in a session's cache."""

    def open(self, message: Open) -> None: ...

    def close(self, message: Close) -> None: ...

    def prune(self, message: Prune) -> None: ...

    def cancel(self, message: Cancel) -> None: ...

    def admit(self, segment: Segment) -> Segment | None: ...

    def compute(self, admitted: Segment, poll: Poll | None = None) -> tuple[list[Tap], Segment | Output]: ...
