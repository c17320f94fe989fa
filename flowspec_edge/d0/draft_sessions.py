"""Makes D0's side of requests: their checks, and what they draft with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable

from flowspec_edge.d0.prefix_cache import PrefixHit
from flowspec_edge.d0.prompt_chunks import PromptCurve
from flowspec_edge.d0.request import Request
from flowspec_edge.d0.session import DraftSession
from flowspec_edge.d0.target import Target
from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.ngram import MergedDrafter, NgramDrafter
from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kinds import NGRAM
from flowspec_edge.strategies.base import Pipeline
from flowspec_edge.strategies.draft_choice import HasDrafts, draft_kind, draft_label
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.tree.acceptance import AcceptanceWeights


class DraftSessions(ABC):
    """The draft sessions of a model.

    ``DraftModels`` computes with weights; ``drivers.virtual.recorded.RecordedSessions`` looks them up.

    head        what D0 asks of the target
    has_drafts  what draft models there are
    limit       tokens of prompt and answer that the model was made for
    """

    def __init__(self, head: Target, has_drafts: HasDrafts, limit: int) -> None:
        self._head, self._has_drafts, self._limit = head, has_drafts, limit
        # By kind of draft model.
        self._acceptance: defaultdict[str | None, AcceptanceWeights] = defaultdict(AcceptanceWeights)

    @abstractmethod
    def depths(self, stages: int) -> tuple[int, ...]:
        """Return how many layers a row has passed after each stage."""

    @abstractmethod
    def drafter(self, kind: str) -> Drafter:
        """Return a drafter for a session, with the draft model of ``kind``."""

    def check(self, request: Request) -> None:
        """Raise UsageError for a request that cannot run on this model."""
        length = len(request.prompt) + request.max_new_tokens
        if length > self._limit:
            raise UsageError(
                f"the prompt has {len(request.prompt)} tokens and {request.max_new_tokens} more are "
                f"asked for, but the model stops at {self._limit}; shorten the prompt or lower "
                "--max-new-tokens"
            )
        vocabulary = self._head.vocabulary
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise UsageError(f"the prompt has a token id outside the vocabulary of {vocabulary}")
        token_ids = {"logit_bias": request.penalties.logit_bias if request.penalties else (),
                     "restrictions": request.restrictions.tokens if request.restrictions else ()}
        for name, tokens in token_ids.items():
            if not all(0 <= token < vocabulary for token in tokens):
                raise UsageError(f"{name}: a token id is outside the vocabulary of {vocabulary}")

    def can_share_drafter(self, first: Request, second: Request) -> bool:
        """Return whether one request's drafter can serve the other; UsageError if either cannot run."""
        return self._drafter_key(first) == self._drafter_key(second)

    def _drafter_key(self, request: Request) -> tuple[object, ...]:
        params = request.params
        strategy = strategy_class(request.strategy)
        kind = draft_kind(strategy, params, self._has_drafts)
        looks_up = kind == NGRAM.name or (kind is not None and strategy.merges_look_up(params))
        return (kind, looks_up, *((params.ngram_max, params.ngram_min) if looks_up else ()))

    def draft_session(self, request: Request, stages: int, clock: Callable[[], float], session: int,
                      passes: Callable[[str], float], slot: Callable[[int], float] | None = None,
                      predecessor: DraftSession | None = None, prefix: PrefixHit | None = None,
                      around: Callable[[Drafter], Drafter] | None = None, sparse: bool = False,
                      carries: bool = False, prompts: PromptCurve | None = None) -> DraftSession:
        """Create D0's side of one request; UsageError if it cannot run on this model.

        passes       kind of draft model -> passes per full segment's latency through the pipeline
        slot         rows -> time of a segment in the slowest stage and on a link, if known
        predecessor  the request's draft session in an earlier session
        prefix       retained rows of a request that :meth:`can_share_drafter` with this one
        around       wraps a new drafter
        sparse       rows choose experts, or those of the emulated model do
        carries      what the request learns is for later ones, too, unless its parameters say
        prompts      the stages' times of a prompt's segments, if they are known
        """
        self.check(request)
        strategy = strategy_class(request.strategy)
        kind = draft_kind(strategy, request.params, self._has_drafts)
        drafter = prefix.prefix.drafter if prefix else None
        ranking = request.sampling, request.params.rank, request.params.tau
        if prefix and drafter and not drafter.rewind(prefix.rows + 1, *ranking):
            prefix = drafter = None
        if kind and drafter is None:
            drafter = self._drafter(kind, request.params, strategy.merges_look_up(request.params))
            drafter = around(drafter) if around else drafter
        cached_rows, parent = (prefix.rows, prefix.prefix.session) if prefix else (0, -1)
        pipeline = Pipeline(stages, self.depths(stages), passes(kind) if kind else 1.0, slot, sparse,
                            self._acceptance[kind], carries)
        return DraftSession(request, lambda builder: strategy(request.params, builder, pipeline), drafter,
                            self._head, clock, session, predecessor=predecessor,
                            cached_rows=cached_rows, parent_session=parent,
                            draft=draft_label(strategy, request.params, kind), prompts=prompts)

    def _drafter(self, kind: str, params: Params, merged: bool = False) -> Drafter:
        looked_up = NgramDrafter(params.ngram_max, params.ngram_min)
        if kind == NGRAM.name:
            return looked_up
        return MergedDrafter(self.drafter(kind), looked_up) if merged else self.drafter(kind)
