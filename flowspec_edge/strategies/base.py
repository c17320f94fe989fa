"""The protocol of every strategy: facts in, decisions out.

A strategy decides what to draft, what to send and what to give up, for one request.  It sees no
socket, no clock and no tensor library.  A driver asks for the next segment when the first stage
has a free slot and for the next draft pass when D0 is idle, so a strategy always decides with the
newest knowledge; it never waits and is never waited for.

How the systems to come fit in: PipeDec's ``next_segment`` is one tree layer; PipeInfer's
``controls`` returns Cancels and its runs are micro-trees; PEARL sends a chain of gamma and drafts
the next one meanwhile; SPD sends one token and asks for taps; all of them name the draft model they want in
``drafter``.  A tensor-parallel baseline sends the whole tree as one segment; that other devices
compute it together is the cluster's affair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flowspec_edge.messages import Cancel, Prune, Segment
from flowspec_edge.strategies.params import Params
from flowspec_edge.tree.ledger import Ledger
from flowspec_edge.tree.requests import Commit, DraftRequest, Expansion


@dataclass
class Counters:
    """What a strategy did; tokens unless the name says otherwise."""

    drafted: int = 0  # draft tokens sent into the pipeline
    verified: int = 0  # rows that came back from it
    rounds: int = 0  # rounds that ended in a miss


class Strategy(ABC):
    """One request's decisions."""

    name: ClassVar[str]
    summary: ClassVar[str]
    drafter: ClassVar[str | None] = "eagle2"  # the kind of draft model it wants, if any

    def __init__(self, params: Params, ledger: Ledger, stages: int) -> None:
        self.params = params
        self.ledger = ledger
        self.stages = stages
        self.counters = Counters()

    @property
    def max_in_flight(self) -> int:
        """Segments that may be between D0 and D0.

        One a stage: when all stages hold one, the next output is due in the very moment the first
        stage falls free, and a segment cut after it is worth more than one cut before it.
        """
        return self.stages

    @abstractmethod
    def start(self, token: int, position: int) -> None:
        """The prompt is in the pipeline's caches; ``token`` is the first generated one."""

    @abstractmethod
    def verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        """Segment ``run`` has come back: after row ``numbers[i]`` the text goes on with
        ``successors[i]``.  Returns the tokens that became text, in order."""

    @abstractmethod
    def next_segment(self) -> Segment | None:
        """What to send now that the first stage has a free slot; None to leave it idle."""

    def next_draft(self) -> DraftRequest | None:
        """What to draft now that D0 is idle; None to stay idle."""
        return None

    def drafted(self, request: DraftRequest, expansion: Expansion) -> None:
        """The answer to ``request``; the tree may have moved on since it was asked."""

    def controls(self) -> list[Prune | Cancel]:
        """Hints for the stages that arose since the last call."""
        return []
