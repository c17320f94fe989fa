"""Drafts without a model: what followed the newest tokens where the text had them before.

Prompt look-up: good where an answer repeats its prompt or itself (code edits, summaries,
quotations), silent elsewhere.  Knows the text and the paths to tree nodes; knows neither model nor
tokenizer, and ignores the target's features.

The index is a trie of reversed contexts that grows by every committed token: O(longest) steps a
token, O(longest) a node that is looked up, however long the text; memory O(longest) a token.

Scores are estimates of the probability that the target agrees.  A context of n tokens that was
followed C times, by D different tokens, of which c times by this one, gives

    p = c / (C + e D^2)        e = 4, 1, 0.8, 1/3 for n = 1, 2, 3, 4 or more

(prediction by partial matching, with an escape that grows with D^2), and what is left over for
anything else, e D^2 / (C + e D^2), scales the candidates of the next shorter context.  So the
candidates of a node never sum to more than 1.  ``e`` was fitted to how often the best candidate of
the longest context was right in 240 prompts of six public sets (news, questions, code, arithmetic;
68 000 tokens of the demonstration model's tokenizer).  Estimate / share that was right, there /
in greedy answers of the demonstration model to its 64 held-out prompts (9 300 tokens):

    C = c = 1:        n = 1  0.20 / 0.19 / 0.26     2  0.50 / 0.48 / 0.56
                      n = 3  0.56 / 0.55 / 0.64     4+ 0.75 / 0.75 / 0.84
    C = c = 2:        n = 2  0.67 / 0.70 / 0.74     4+ 0.86 / 0.85 / 0.95
    C = 2, c = 1:     n = 2  0.17 / 0.17 / 0.43     4+ 0.30 / 0.21 / 0.63
    after an escape:  3 -> 2 0.07 / 0.10 / 0.17     4+ -> 3  0.05 / 0.07 / 0.03

Text sampled at temperature 1 from the demonstration model, which is far from certain, repeats
itself less: 0.24 in place of 0.48 for n = 2, 0.73 in place of 0.75 for n = 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Payload, Tap
from flowspec_edge.sampling import Rank, Sampling, gumbel
from flowspec_edge.tree.requests import DraftNode, DraftRequest, Expansion

_ESCAPE = (4.0, 1.0, 0.8, 1 / 3)  # e by the context's length; the last one for all longer ones
_LOOKED_AT = 16  # followers of one context, at least
_NO_ROOT = -2  # no node has this id (-1 is the root's parent)


class _Context:
    """Some tokens in a row, and what has followed them in the text."""

    __slots__ = ("after", "longer", "total")

    def __init__(self) -> None:
        self.longer: dict[int, _Context] = {}  # by the token before this context's first
        self.after: dict[int, int] = {}  # follower -> how often; the newest is the last
        self.total = 0  # sum of ``after``


class TextIndex:
    """Which tokens followed every run of ``shortest`` to ``longest`` tokens of a growing text."""

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest, self.shortest = longest, shortest
        self.reset()

    def reset(self) -> None:
        self._text: list[int] = []
        self.newest: tuple[int, ...] = ()  # its last ``longest`` tokens
        self._empty = _Context()

    @property
    def length(self) -> int:
        """Of the text."""
        return len(self._text)

    def rewind(self, length: int) -> None:
        """The text is but its first ``length`` tokens; they are taken in again, as after a reset."""
        text = self._text[:length]
        self.reset()
        for token in text:
            self.append(token)

    def append(self, token: int) -> None:
        """The text goes on with ``token``."""
        for _, context in self._contexts(self.newest, grow=True):
            context.after[token] = context.after.pop(token, 0) + 1  # put behind all others
            context.total += 1
        self._text.append(token)
        self.newest = (*self.newest, token)[-self.longest :]

    def candidates(self, path: Sequence[int], count: int) -> list[tuple[int, float]]:
        """The ``count`` likeliest tokens after a path that ends with ``path``, likeliest first, with
        the estimates that the module explains; fewer if the text offers no more.

        Of equals the longer context's go first, then the newest.  Of one context only the newest
        few followers are looked at.
        """
        found: dict[int, float] = {}
        left = 1.0  # the probability that no longer context was right
        for length, context in reversed(list(self._contexts(path))):
            escape = _ESCAPE[min(length, len(_ESCAPE)) - 1] * len(context.after) ** 2
            scale = left / (context.total + escape)
            newest = islice(reversed(context.after.items()), max(count, _LOOKED_AT))
            for token, times in sorted(newest, key=lambda item: -item[1]):
                found.setdefault(token, times * scale)
            left = escape * scale
        return sorted(found.items(), key=lambda item: -item[1])[:count]

    def _contexts(self, path: Sequence[int], grow: bool = False) -> Iterator[tuple[int, _Context]]:
        """(n, context) for the last n tokens of ``path``, as far as the text has had them."""
        context = self._empty
        for n, before in enumerate(reversed(path[-self.longest :]), start=1):
            following = context.longer.get(before)
            if following is None:
                if not grow:
                    return
                following = context.longer[before] = _Context()
            context = following
            if n >= self.shortest:
                yield n, context


class NgramDrafter:
    """Implements :class:`flowspec_edge.drafting.base.Drafter` by looking up.

    A node has as many children as the text offers; the others are absent (``Expansion``).

    ``rank="noise"`` while sampling: a candidate stands for no distribution, only for "with
    probability p it is this token".  Of all the noise that decides whether it wins, its own g is
    the part that concerns it; given g, it wins over everything else together, whose mass is 1 - p,
    with probability exp(-(1 - p) / p * exp(-g)), whose mean over g is p again.  That is its score.
    """

    taps = ()

    def __init__(self, vocabulary: int, longest: int, shortest: int) -> None:
        """``vocabulary`` is the target's, for its noise; contexts have shortest to longest tokens."""
        self._vocabulary = vocabulary
        self._index = TextIndex(longest, shortest)
        self.reset(Sampling(), "draft", 1.0)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        self._index.reset()
        self._begin(sampling, rank)

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        if not 0 < tokens <= self._index.length:
            return False
        self._index.rewind(tokens)
        self._begin(sampling, rank)
        return True

    def _begin(self, sampling: Sampling, rank: Rank) -> None:
        self._sampling = sampling
        self._noisy = rank == "noise" and not sampling.greedy
        self._root = _NO_ROOT
        self._paths: dict[int, tuple[int, ...]] = {}  # by node: the last tokens of its path

    def commit(self, tokens: Sequence[int], features: Payload | None, rows: Sequence[int] = ()) -> None:
        for token in tokens:
            self._index.append(token)

    def tap(self, message: Tap) -> None:
        """Hidden states are of no use here."""
        return

    def expand(self, request: DraftRequest) -> Expansion:
        if request.root != self._root:
            self._root = request.root
            # A child's id is larger than its parent's, so nothing at or below this id is needed.
            self._paths = {node: path for node, path in self._paths.items() if node > request.root}
        children = Expansion.empty(len(request.nodes), request.children)
        for row, node in enumerate(request.nodes):
            found = self._index.candidates(self._path(node), request.children)
            if not found:
                continue
            ids = np.array([token for token, _ in found], np.int32)
            ranks = self._log_scores(ids, np.array([p for _, p in found]), node.position + 1)
            best = np.argsort(-ranks, kind="stable")
            children.tokens[row, : len(ids)] = ids[best]
            children.scores[row, : len(ids)] = ranks[best]
        return children

    def _path(self, node: DraftNode) -> tuple[int, ...]:
        """The last tokens of the text that ends with ``node``."""
        index = self._index
        if node.id == self._root:
            if node.position != index.length - 1:
                raise ProtocolError(
                    f"the root stands at position {node.position}, but the drafter was given a text "
                    f"of {index.length} tokens: tokens must be committed before they are drafted on"
                )
            return index.newest
        above = index.newest if node.parent == self._root else self._paths.get(node.parent)
        if above is None:
            raise ProtocolError(f"draft node {node.id} was asked for before its parent {node.parent}")
        path = self._paths[node.id] = (*above, node.token)[-index.longest :]
        return path

    def _log_scores(self, tokens: NDArray[np.int32], p: NDArray[np.float64], position: int
                    ) -> NDArray[np.float64]:
        """Log confidences of ``tokens`` [k] with the estimates ``p`` [k] at ``position``."""
        if not self._noisy:
            return np.log(p)
        g = gumbel(self._sampling.seed, position, self._vocabulary)[tokens]
        return -(1 - p) / p * np.exp(-g)
