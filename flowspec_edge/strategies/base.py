"""The protocol of every strategy: facts in, decisions out.

A strategy decides what to draft, what to send and what to give up, for one request.  It sees no
socket, no clock and no tensor library.  A driver asks for the next segment when the first stage
has a free slot and for the next draft pass when D0 is idle, so a strategy always decides with the
newest knowledge; it never waits and is never waited for.

A strategy names the draft model it wants (``drafter``), the hidden states it wants back (taps, in
its segments and in ``prompt_taps``) and how the target's devices share the work
(``parallelism``); to load, route and arrange these is the runtime's affair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from flowspec_edge.messages import Cancel, Prune, Segment
from flowspec_edge.sampling import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.tree.ledger import Ledger
from flowspec_edge.tree.requests import Commit, DraftRequest, Expansion

Parallelism = Literal["pipeline", "megatron", "galaxy"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a strategy may know of the devices.

    stages         verification devices
    depths         decoder layers that a row has passed after each stage; empty if nobody asked
    draft_passes   draft passes that fit into a full segment's way through the pipeline and back:
                   how many times faster the draft model is than the target (PEARL's c)
    slot_seconds   rows of a segment -> what it takes in the slowest stage, told by a profile (then with
                   the link after it) or learned from the stages' reports; None where neither is known
    """

    stages: int
    depths: tuple[int, ...] = ()
    draft_passes: float = 1.0
    slot_seconds: Callable[[int], float] | None = None


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
    parallelism: ClassVar[Parallelism] = "pipeline"  # how the target's devices share a segment

    def __init__(self, params: Params, ledger: Ledger, pipeline: Pipeline) -> None:
        self.params = params
        self.ledger = ledger
        self.pipeline = pipeline
        self.counters = Counters()

    @classmethod
    def drafts_with(cls, params: Params) -> str | None:
        """The kind of draft model: the strategy's own, unless ``params`` ask for another."""
        if cls.drafter is None or params.draft == "own":
            return cls.drafter
        return params.draft

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        """Hidden states of the prompt's rows that the drafter wants; see ``messages.Segment``."""
        return ()

    @property
    def max_in_flight(self) -> int:
        """Segments that may be between D0 and D0.

        One a stage: when all stages hold one, the next output is due in the very moment the first
        stage falls free, and a segment cut after it is worth more than one cut before it.
        """
        return self.pipeline.stages

    @property
    def sends_ahead(self) -> bool:
        """Whether a segment may wait at the first stage, where D0 could not send it in time.

        It is cut before D0 starts on work that would last beyond the moment at which the first stage
        falls free (``runtime.pace``).
        """
        return False

    @property
    def learns_slot(self) -> bool:
        """Whether the stages' reports of how long each segment took are of use to it
        (``Pipeline.slot_seconds``); a driver asks for them only then."""
        return False

    def begin(self, text: Sequence[int], sampling: Sampling, vocabulary: int) -> None:
        """Before :meth:`start`: the text so far, how its tokens are drawn, and from how many."""
        return

    @abstractmethod
    def start(self, token: int, position: int) -> None:
        """The prompt is in the pipeline's caches; ``token`` is the first generated one."""

    @abstractmethod
    def verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        """Segment ``run`` has come back: after row ``numbers[i]`` the text goes on with
        ``successors[i]``.  Returns the tokens that became text, in order."""

    @abstractmethod
    def next_segment(self) -> Segment | None:
        """What to send now that the first stage has a free slot, or soon will have (:attr:`sends_ahead`);
        None to leave it idle."""

    def next_draft(self) -> DraftRequest | None:
        """What to draft now that D0 is idle; None to stay idle."""
        return None

    def drafted(self, request: DraftRequest, expansion: Expansion) -> None:
        """The answer to ``request``; the tree may have moved on since it was asked."""

    def controls(self) -> list[Prune | Cancel]:
        """Hints for the stages that arose since the last call."""
        return []
