"""A model that only repeats what a recording holds: no weights, no tensors, no torch.

Stages and D0 run as ever.  A hidden state is the digest of a row's path: the first stage computes it from the row's
token and the digest of its parent, which it keeps where layers keep keys and values, and the other stages pass it on.
To D0's target a digest says which token the recorded model chose after that very path.  A row that is not on a
recorded text gets token 0, which no strategy can make anything of: nothing that follows a wrong token becomes text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.d0.draft_sessions import DraftSessions
from flowspec_edge.d0.request import Likelihood, Request
from flowspec_edge.drafting.base import NO_ROOT, Drafter, parent_missing_error, root_misplaced_error
from flowspec_edge.drivers.virtual.recording import Expansion, RecordedText, Recording
from flowspec_edge.errors import ProtocolError, UsageError
from flowspec_edge.messages import Int32, Payload
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, NGRAM
from flowspec_edge.sampling.rule import Rank, Sampling
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.layers.stage_cache import Bool, CacheKind, LayerArena, Part, PartResult
from flowspec_edge.strategies.draft_choice import draft_kind
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.tree.draft_api import DraftNode, DraftOutput, DraftRequest

if TYPE_CHECKING:
    from torch import Tensor

    from flowspec_edge.strategies.base import Strategy
    from flowspec_edge.strategies.params import Params

_WIRE = "float16"  # four values of 16 bits hold a digest
_WIDTH = 4
_MOST_POSITIONS = 2**30
_MASK = 2**64 - 1
_MOST_MISSING = 0.01  # of the nodes on a text's path, without a warning


def digest(parent: int, token: int) -> int:
    """Return the digest of a path from that of its parent, 0 for none: 64 bits.

    Python's hashes of numbers are the same in every process.
    """
    return hash((parent, token)) & _MASK


# ---- stages --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PathDigests:
    """How the first stage remembers rows; a ``stage_cache.CacheKind``."""

    takes_memory_each = False

    def rows(self, capacity: int, tentative: int) -> int:
        return capacity

    def reserved(self, rows: int, requests: int, tentative: int) -> int:
        return rows

    def reusable(self, text: int, limit: int, snapshot: int) -> int:
        return limit

    def arena(self, layers: Sequence[int], dtype: Any, device: Any, rows: int) -> DigestArena:
        return DigestArena()

    def row_bytes(self, width: int) -> int:
        return 8

    def inputs(self, parts: Sequence[Any], index: int, dtype: Any, device: Any, rows: int) -> tuple[Any, Any]:
        raise AssertionError("a recorded stage has no layers that take inputs")


class DigestArena:
    """A ``stage_cache.LayerArena``: each session has an array of its own."""

    rows = 0
    row_bytes = 8
    nbytes = 0

    def missing(self, capacity: int, existing: Any = None) -> int:
        return 0

    def take(self, capacity: int) -> DigestCache:
        return DigestCache(capacity)

    def widen(self, cache: DigestCache, capacity: int) -> None:
        cache.widen(capacity)

    def give_back(self, cache: DigestCache) -> None:
        return


class DigestCache:
    """The digests of a session's rows; a ``stage_cache.LayerCache``."""

    first = 0

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.digests = np.zeros(capacity, np.uint64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def widen(self, capacity: int) -> None:
        self.digests = np.concatenate([self.digests[: self._length],
                                       np.zeros(capacity - self._length, np.uint64)])
        self.capacity = capacity

    def reserve(self, rows: int) -> None:
        return

    def append(self, rows: int) -> None:
        self._length += rows

    def commit(self, rows: int) -> None:
        return

    def keep(self, mask: Bool) -> None:
        indexes = np.flatnonzero(mask)
        self.digests[: len(indexes)] = self.digests[indexes]
        self._length = len(indexes)

    def retain(self, rows: int) -> None:
        return

    def truncate(self, rows: int) -> None:
        self._length = rows

    def snapshot_at(self, rows: int) -> None:
        return

    def fill(self, rows: int) -> None:
        self._length = rows

    def visible(self, mask: Bool, positions: Int32, columns: Int32) -> Bool:
        return mask

    def rows(self) -> dict[int, Tensor]:
        return {}


class RecordedStage:
    """An ``engine.StageModel``."""

    hidden_size = _WIDTH
    wire = _WIRE

    def __init__(self, vocabulary: int | None, is_last: bool) -> None:
        """Set up a stage that computes nothing; ``vocabulary``: of the first stage's tokens; None on the others."""
        self.vocabulary, self.is_last = vocabulary, is_last
        self.kinds: Sequence[CacheKind] = () if vocabulary is None else (PathDigests(),)
        self.layers_of_kinds: Mapping[CacheKind, Sequence[int]] = {kind: [0] for kind in self.kinds}

    def arena(self, kind: CacheKind, layers: Sequence[int], rows: int) -> LayerArena:
        no_tensors: Any = None  # in place of their type and device
        return kind.arena(layers, no_tensors, no_tensors, rows)

    def row_bytes(self, kind: CacheKind) -> int:
        return kind.row_bytes(0)

    def allocating(self, purpose: str, nbytes: int) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, parts: Sequence[Part], keep_going: Callable[[], bool], graphs: Any) -> list[PartResult] | None:
        if not keep_going():
            return None
        return [PartResult([], self._digests(part) if part.segment.hidden is None else part.segment.hidden)
                for part in parts]

    def _digests(self, part: Part) -> Payload:
        """Return the digests of a segment's rows, and write them to the cache behind its last row."""
        [cache] = part.cache.parts
        assert isinstance(cache, DigestCache)
        tokens, positions = part.segment.tokens, part.segment.positions
        assert tokens is not None
        before = part.mask & (part.columns == positions[:, None] - 1)
        parents, has_parent = before.argmax(axis=1).tolist(), before.any(axis=1).tolist()
        start, cached_digests = len(cache), cache.digests[: len(cache)]
        row_digests: list[int] = []
        for token, parent, has in zip(tokens.tolist(), parents, has_parent, strict=True):
            above = 0 if not has else int(cached_digests[parent]) if parent < start else row_digests[parent - start]
            row_digests.append(digest(above, token))
        new = np.array(row_digests, np.uint64)
        cache.digests[start : start + len(row_digests)] = new
        return Payload(_WIRE, new.view(np.float16).reshape(-1, _WIDTH))

    def no_rows(self) -> Payload:
        return Payload(_WIRE, np.empty((0, _WIDTH), np.float16))

    def correlation(self, rows: int) -> float | None:
        return None


def _settled(sampling: Sampling) -> Sampling:
    """Return ``sampling`` without the settings that do not affect a greedy choice."""
    return Sampling() if sampling.greedy else sampling


# ---- D0 ------------------------------------------------------------------------------------------------------


class RecordedTarget:
    """A ``d0.target.Target``; states and logits are digests, uint64 [n]."""

    hidden_size = _WIDTH

    def __init__(self, recording: Recording) -> None:
        self.vocabulary = recording.vocabulary
        self._after: defaultdict[Sampling, dict[int, int]] = defaultdict(dict)
        for text in recording.texts:
            following, path = self._after[_settled(text.sampling)], 0
            for token in text.prompt:
                path = digest(path, token)
            for token in (*text.answer, *(() if text.stop is None else (text.stop,))):
                following[path] = token
                path = digest(path, token)

    def first_row_not_finite(self, hidden: Payload) -> int | None:
        return None

    def states(self, hidden: Payload) -> NDArray[np.uint64]:
        return np.ascontiguousarray(hidden.array).view(np.uint64)[:, 0]

    def stacked(self, rows: Sequence[tuple[NDArray[np.uint64], int]]) -> NDArray[np.uint64]:
        return np.array([states[row] for states, row in rows], np.uint64)

    def joined(self, parts: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        return np.concatenate(list(parts))

    def logits(self, states: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return states

    def choose(self, logits: NDArray[np.uint64], positions: NDArray[np.integer], sampling: Sampling,
               allowed: NDArray[np.uint8] | None = None) -> NDArray[np.int32]:
        following = self._after.get(_settled(sampling), {})
        return np.array([following.get(path, 0) for path in logits.tolist()], np.int32)

    def likelihoods(self, states: NDArray[np.uint64], tokens: Sequence[int], most: int) -> list[Likelihood]:
        raise UsageError("a recording has no probabilities of tokens: leave logprobs out")


@dataclass
class RequestedNodes:
    """The nodes whose children drafters were asked for.

    right    of them, those that are on the recorded text: only their children can become text
    missing  of these, those that the recording does not have
    """

    nodes: int = 0
    right: int = 0
    missing: int = 0


class RecordedDrafter(Drafter):
    """The head's children as a recording has them, below the newest root."""

    taps = ()

    def __init__(self, texts: Iterable[RecordedText], requested: RequestedNodes) -> None:
        self._texts, self._requested = list(texts), requested
        self.reset(Sampling(), "draft", 1.0)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self._accepted: list[int] = []
        self._begin(sampling)

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        if not 0 < tokens <= len(self._accepted):
            return False
        del self._accepted[tokens:]
        self._begin(sampling)
        return True

    def _begin(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._text: RecordedText | None = None
        self._root = NO_ROOT
        self._nodes: dict[int, tuple[int, int]] = {}  # asked for: by id, parent and token
        self._positions: dict[int, int | None] = {}  # below this root, by id: the node in its expansion

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        self._accepted += tokens

    def expand(self, request: DraftRequest) -> DraftOutput:
        if request.root != self._root:
            self._root = request.root
            self._nodes = {node: children for node, children in self._nodes.items() if node > request.root}
            self._positions = {}
        if self._text is None:
            self._text = self._find()
        output = DraftOutput.empty(len(request.nodes), request.children)
        expansion = self._text and self._expansion(self._text)
        for row, node in enumerate(request.nodes):
            if node.id == request.root:
                if node.position != len(self._accepted) - 1:
                    raise root_misplaced_error(node, len(self._accepted))
            elif node.parent != request.root and node.parent not in self._nodes:
                raise parent_missing_error(node)
            else:
                self._nodes[node.id] = node.parent, node.token
            if not expansion:
                continue  # the answer is complete: nothing below it can become text
            position = self._find_position(node.id, expansion.index)
            right = self._is_right(node.id)
            self._requested.nodes += 1
            self._requested.right += right
            if position is None:
                self._requested.missing += right
                if right:
                    continue
                position = _stand_in(node, expansion)
            count = min(request.children, expansion.tokens.shape[1])
            output.tokens[row, :count] = expansion.tokens[position, :count]
            output.scores[row, :count] = expansion.scores[position, :count]
        return output

    def shares_passes_with(self, other: Drafter) -> bool:
        return isinstance(other, RecordedDrafter) and other._requested is self._requested

    def _find_position(self, node: int, index: Mapping[tuple[int, int], int]) -> int | None:
        if node == self._root:
            return 0
        if node not in self._positions:
            parent, token = self._nodes[node]
            above = self._find_position(parent, index)
            self._positions[node] = None if above is None else index.get((above, token))
        return self._positions[node]

    def _is_right(self, node: int) -> bool:
        """Whether the path from the root to it is the text."""
        assert self._text is not None
        tokens: list[int] = []
        while node != self._root:
            node, token = self._nodes[node]
            tokens.append(token)
        start = len(self._accepted) - len(self._text.prompt)
        return self._text.answer[start : start + len(tokens)] == tuple(reversed(tokens))

    def _expansion(self, text: RecordedText) -> Any:
        newest = len(self._accepted) - len(text.prompt) - 1
        return text.roots[newest] if newest < len(text.roots) else None

    def _find(self) -> RecordedText:
        for text in self._texts:
            tokens = (*text.prompt, *text.answer)
            if _settled(text.sampling) == _settled(self._sampling) and len(self._accepted) > len(text.prompt) and (
                    tuple(self._accepted[: len(tokens)]) == tokens[: len(self._accepted)]):
                return text
        raise ProtocolError("the recording has no text that begins as this request's does")


def _stand_in(node: DraftNode, expansion: Expansion) -> int:
    """Return a recorded node whose children are as good as those of ``node``, which is not recorded.

    Nothing below a node that is not on the text can become text, whatever its children are.  But they compete with
    right ones for rows and for draft passes, as likely as the head says; without any, a strategy that drafts many
    nodes deeply (PipeDec over eight stages) would be half as fast again.  So they are those of another recorded node,
    one that continues with the same token if there is one.
    """
    child = expansion.by_token.get(node.token)
    if child is not None:
        return child
    return 1 + digest(node.id, node.token) % (len(expansion.node_tokens) - 1) if len(expansion.node_tokens) > 1 else 0


class RecordedSessions(DraftSessions):
    """The draft sessions of a recording.

    ``requested``: the nodes whose children the drafters of all requests were asked for.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__(RecordedTarget(recording), _Drafts(recording), _MOST_POSITIONS)
        self._recording = recording
        self.requested = RequestedNodes()

    def depths(self, stages: int) -> tuple[int, ...]:
        return ()

    def drafter(self, kind: str) -> Drafter:
        return RecordedDrafter(self._recording.texts, self.requested)

    def check(self, request: Request) -> None:
        recording, name = self._recording, self._recording.display_name
        kind = require_drafts(strategy_class(request.strategy), request.params, recording)
        if request.penalties or request.restrictions or request.grammar or request.logprobs is not None:
            raise UsageError(f"{name} has texts without penalties, grammars, restrictions and probabilities")
        if kind == recording.draft and not request.sampling.greedy and (
                (request.params.rank, request.params.tau) != (recording.rank, recording.tau)):
            raise UsageError(f"{name} ranks children by rank={recording.rank} and tau={recording.tau:g}: leave "
                             "--set rank and --set tau out, or measure with the model")
        answer_to(request, recording)


@dataclass(frozen=True)
class _Drafts:
    """The recorded kind of draft, which stands for every kind of head (``draft_choice.HasDrafts``)."""

    recording: Recording

    def draft(self, kind: str) -> object:
        return kind if kind == self.recording.draft else None


def require_drafts(strategy: type[Strategy], params: Params, recording: Recording) -> str | None:
    """Return the kind that ``strategy`` drafts with, as ``draft_choice.draft_kind``.

    UsageError if the recording lacks that kind's drafts.
    """
    kind = draft_kind(strategy, params, _Drafts(recording))
    if kind not in (None, NGRAM.name, recording.draft):
        raise UsageError(f"{strategy.name} drafts with {DRAFT_KINDS[kind].title} here, and {recording.display_name} "
                         f"has what {recording.draft} said: leave --draft out, or leave {strategy.name} out")
    return kind


class RecordedModel:
    """A ``cluster.VirtualModel``."""

    def __init__(self, recording: Recording) -> None:
        self.sessions = RecordedSessions(recording)
        self._recording = recording

    def engines(self, stages: int) -> list[StageEngine]:
        return [StageEngine(RecordedStage(self._recording.vocabulary if i == 0 else None, i == stages - 1))
                for i in range(stages)]

    def whole(self, stages: int) -> StageEngine:
        return StageEngine(RecordedStage(self._recording.vocabulary, True))

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def note(self) -> str:
        """Say how much of what strategies asked for is not in the recording."""
        requested = self.sessions.requested
        if not requested.missing:
            return ""
        share = requested.missing / requested.right
        advice = "; the figures are too low: record with more --nodes" if share > _MOST_MISSING else ""
        return (f"{'warning' if advice else 'note'}: {self._recording.display_name} lacks the children of {share:.1%} "
                f"of the {requested.right:,} nodes on a text's path that were drafted below{advice}")


def request_of(text: RecordedText, recording: Recording, max_new_tokens: int, **others: Any) -> Request:
    """Return the request whose answer this is, up to a number of tokens."""
    most = len(text.answer) if text.reason == "length" else max_new_tokens
    return replace(Request(text.prompt, max_new_tokens=min(max_new_tokens, most), sampling=text.sampling,
                           stop_ids=recording.stop_ids), **others)


def answer_to(request: Request, recording: Recording) -> tuple[list[int], str]:
    """Return the recorded answer and why it ended, as plain decoding gives them. UsageError if it has none."""
    for text in recording.texts:
        if text.prompt == tuple(request.prompt) and _settled(text.sampling) == _settled(request.sampling):
            if request.max_new_tokens <= len(text.answer):
                return list(text.answer[: request.max_new_tokens]), "length"
            if text.reason == "stop":
                return list(text.answer), "stop"
            raise UsageError(f"{recording.display_name} has {len(text.answer)} tokens after the prompt {text.name}, "
                             f"not {request.max_new_tokens}: lower --max-new-tokens")
    raise UsageError(f"{recording.display_name} has no text of this prompt with {request.sampling}")
