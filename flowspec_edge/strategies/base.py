"""The interface of every strategy: facts in, decisions out, for one request.

A strategy sees no socket, no clock and no tensor library.  The driver asks for a segment when the first stage
has a free slot and for a draft pass when D0 is idle, so decisions use the newest facts and never wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from flowspec_edge.messages import Cancel, Prune, Segment
from flowspec_edge.model.draft_kinds import EAGLE2, OWN
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.parameters import Parameters
from flowspec_edge.tree.acceptance import AcceptanceWeights
from flowspec_edge.tree.draft_api import Commit, DraftOutput, DraftRequest
from flowspec_edge.tree.segment_builder import SegmentBuilder

Parallelism = Literal["pipeline", "megatron", "galaxy"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a strategy may know of the devices.

    depths        decoder layers that a row has passed after each stage; empty if not requested
    draft_passes  draft passes in a full segment's round trip through the pipeline (PEARL's c)
    slot_seconds  rows of a segment -> seconds in the slowest stage, from a profile (then with the
                  link after it) or from the stages' reports; None: unknown
    sparse        whether rows choose experts, so that every row costs time (``slot_worth``)
    acceptance    of the draft model's tokens, as all requests that carry have learned it
    carries       whether a request goes on with that, unless its parameters say
    """

    stages: int
    depths: tuple[int, ...] = ()
    draft_passes: float = 1.0
    slot_seconds: Callable[[int], float] | None = None
    sparse: bool = False
    acceptance: AcceptanceWeights = field(default_factory=AcceptanceWeights)
    carries: bool = False


@dataclass
class TokenCounters:
    """Counts of tokens unless the name says otherwise."""

    drafted: int = 0  # draft tokens sent into the pipeline
    verified: int = 0  # rows that came back from it
    rounds: int = 0  # rounds that ended in a miss


class Strategy(ABC):
    """What to draft and what to send for one request; ``__init__`` belongs to the driver.

    name         by which commands and requests know it
    title        what figures and the page call it; without one, its name
    summary      a line for lists
    drafter      draft model: a key of ``draft_kinds.DRAFT_KINDS``, or None
    parameters   the dataclass that declares its parameters: the names of ``--set``
    parallelism  "pipeline": every stage has some layers. "megatron", "galaxy": every device has a slice of all
                 layers; such a group exists in virtual time only: computed whole, charged as a group
    params       the user's values of them
    builder      numbers rows and builds segments and prunes
    pipeline     what is known of the devices
    counters     to be counted by the strategy
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    drafter: ClassVar[str | None] = EAGLE2.name  # the kind of draft model it wants, if any
    parameters: ClassVar[type[Parameters]] = Parameters
    parallelism: ClassVar[Parallelism] = "pipeline"  # how the target's devices share a pass

    def __init_subclass__(cls) -> None:
        """Keep a derived strategy with a name of its own from taking over its parent's title."""
        super().__init_subclass__()
        attributes = vars(cls)
        if "name" in attributes:
            cls.title = attributes.get("title", cls.name)

    def __init__(self, params: Parameters, builder: SegmentBuilder, pipeline: Pipeline) -> None:
        self.params = params.select(self.parameters)
        self.builder = builder
        self.pipeline = pipeline
        self.counters = TokenCounters()

    @classmethod
    def drafts_with(cls, params: Parameters) -> str | None:
        """Return the kind of draft model: the strategy's own unless ``params`` name another."""
        if cls.drafter is None or params.draft == OWN:
            return cls.drafter
        return params.draft

    @classmethod
    def looks_up(cls, params: Parameters) -> bool:
        """Whether it also follows continuations from earlier in the text."""
        return bool(params.ngram) and cls.drafter is not None

    @classmethod
    def merges_look_up(cls, params: Parameters) -> bool:
        """Whether D0 merges these continuations into the draft model's children for it."""
        return cls.looks_up(params)

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        """The ``Segment.taps`` of the prompt's rows."""
        return ()

    @property
    def max_in_flight(self) -> int:
        """The most segments in flight: one per stage.

        When every stage holds one, the next output arrives just as the first stage becomes idle, so the segment
        built then takes it into account.
        """
        return self.pipeline.stages

    @property
    def allows_early_send(self) -> bool:
        """Whether a segment may wait at a busy first stage (``d0.scheduler``)."""
        return False

    @property
    def wants_stage_times(self) -> bool:
        """Whether the stages are to report the time of each segment (``Pipeline.slot_seconds``)."""
        return False

    def begin(self, text: Sequence[int], sampling: Sampling) -> None:
        """Take the text so far; called before :meth:`start`."""
        return

    @abstractmethod
    def start(self, token: int, position: int) -> None:
        """Begin to decode: the prompt is in the stages' caches, and ``token`` is the first generated one."""

    @abstractmethod
    def on_verified(self, run: int, numbers: Sequence[int], successors: Sequence[int]) -> list[Commit]:
        """Take a verdict and return what became text.

        ``successors[i]`` is the target's token after row ``numbers[i]`` of ``run``.
        """

    @abstractmethod
    def next_segment(self, rows: int | None = None) -> Segment | None:
        """Return the next segment, if there is one; called when the first stage is idle, or soon will be.

        "Soon" depends on :attr:`allows_early_send`.  ``rows``: the most that a batch has for this segment; given only
        to strategies with :meth:`row_probabilities`.
        """

    def row_probabilities(self, limit: int) -> Sequence[float] | None:
        """P(row becomes text) of the next rows, ``limit`` at most, in the order in which they would be sent.

        The requests of a batch share its rows by these; None: the strategy's segments cannot be divided, and go
        into a batch whole.
        """
        return None

    def next_draft(self) -> DraftRequest | None:
        """Say what to draft; D0 is idle."""
        return None

    def on_tap(self, run: int, layer: int) -> None:
        """Take note that hidden states of ``run``'s rows after ``layer`` layers have arrived for the drafter."""
        return

    def on_draft(self, request: DraftRequest, output: DraftOutput) -> None:
        """Take the output of the draft pass ``request``; the tree may have changed since the pass began."""

    def controls(self) -> list[Prune | Cancel]:
        """Messages for the stages since the last call."""
        return []
