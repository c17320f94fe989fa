"""What followed the newest tokens where the text had them before: prompt look-up, without a model.

Knows the text; knows neither models, nor trees, nor who asks.  Good where an answer repeats its
prompt or itself (code edits, summaries, quotations), silent elsewhere.

The index is a trie of reversed contexts that grows by every committed token: O(longest) steps a
token, O(longest) a node that is looked up, however long the text.  A context that has come once is only
a place in the text, and the longer ones around it are read there: so a token adds hardly more than one.

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

_ESCAPE = (4.0, 1.0, 0.8, 1 / 3)  # e by the context's length; the last one for all longer ones
_LOOKED_AT = 16  # followers of one context, at least


class _Context:
    """Some tokens in a row, and what has followed them in the text."""

    __slots__ = ("after", "longer", "total")

    def __init__(self) -> None:
        # By the token before this context's first.  An integer is a longer context that has come once:
        # where in the text its follower stands.
        self.longer: dict[int, _Context | int] = {}
        self.after: dict[int, int] = {}  # follower -> how often; the newest is the last
        self.total = 0  # sum of ``after``

    def followed_by(self, token: int) -> None:
        self.after[token] = self.after.pop(token, 0) + 1  # put behind all others
        self.total += 1


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
        context = self._empty
        for n, before in enumerate(reversed(self.newest), start=1):
            longer = context.longer.get(before)
            if longer is None:
                context.longer[before] = len(self._text)
                break
            if isinstance(longer, int):
                longer = context.longer[before] = self._unfolded(longer, n)
            longer.followed_by(token)
            context = longer
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

    def _contexts(self, path: Sequence[int]) -> Iterator[tuple[int, _Context]]:
        """(n, context) for the last n tokens of ``path``, as far as the text has had them."""
        context, follower = self._empty, -1  # the latter once the context has come but once
        for n, before in enumerate(reversed(path[-self.longest :]), start=1):
            if follower >= 0:
                if n > follower or self._text[follower - n] != before:
                    return
            else:
                longer = context.longer.get(before)
                if longer is None:
                    return
                if isinstance(longer, int):
                    follower = longer
                    longer = self._unfolded(longer, n)
                context = longer
            if n >= self.shortest:
                yield n, context

    def _unfolded(self, follower: int, n: int) -> _Context:
        """The context of the ``n`` tokens before the place ``follower`` in the text, where alone it came."""
        context = _Context()
        context.followed_by(self._text[follower])
        if n < self.longest and n < follower:
            context.longer[self._text[follower - n - 1]] = follower
        return context
