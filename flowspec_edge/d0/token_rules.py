"""What an answer's own tokens change in the choice of the next: a grammar, penalties, and restrictions.

All depend on the text before a row alone, so each row of the draft tree is judged by its own path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.d0.target import Logits
from flowspec_edge.errors import UsageError
from flowspec_edge.messages import Output, Segment, unpack_bits
from flowspec_edge.model.grammar import GrammarState
from flowspec_edge.sampling.restrictions import AnswerRestrictions

if TYPE_CHECKING:
    from flowspec_edge.sampling.sampler import AnswerPenalties  # imports torch

# Logits [n, V]; the tokens to choose from, as ``sampler.choose`` takes them, None: all.
Choices = tuple[Logits, "NDArray[np.uint8] | None"]

_STUCK = ("no token may come next: this request's allowed tokens, bad words, least number of tokens and "
          "grammar exclude all")


class TokenRules:
    """Knows the paths of the rows in flight; applies grammar, penalties and restrictions when they return."""

    def __init__(self, grammar: GrammarState | None, penalties: AnswerPenalties | None,
                 restrictions: AnswerRestrictions | None = None) -> None:
        """All are at the newest token of the text, always."""
        self._grammar, self._penalties, self._restrictions = grammar, penalties, restrictions
        self._stuck: set[int] = set()  # numbers of rows that no token may follow
        self._paths_by_run: dict[int, dict[int, tuple[int, list[int]]]] = {}  # run -> number -> position, path
        self._paths: dict[int, list[int]] = {}  # number -> tokens of its uncommitted ancestors and its own

    def record_segment(self, segment: Segment) -> None:
        """Remember the paths of a segment's rows, from the first token that was not committed."""
        assert segment.tokens is not None
        bits = unpack_bits(segment.bits, segment.stop - segment.base)
        self._paths = {n: path for n, path in self._paths.items() if n >= segment.base}
        rows = {}
        for i, number in enumerate(segment.numbers.tolist()):
            ancestors = segment.base + np.flatnonzero(bits[i])
            above = [self._paths[n][-1] for n in ancestors.tolist() if n != number]
            self._paths[number] = [*above, int(segment.tokens[i])]
            rows[number] = int(segment.positions[i]), self._paths[number]
        self._paths_by_run[segment.run] = rows

    def newest(self, logits: Logits) -> Choices:
        """Apply them to the ``logits`` [1, V] of the newest token of the text."""
        choices, stuck = self._applied(logits, [()])
        if stuck:
            raise UsageError(_STUCK)
        return choices

    def returned(self, output: Output, text: int, logits: Logits) -> Choices:
        """Apply them to the ``logits`` of an output's rows; ``text``: tokens of prompt and answer."""
        rows = self._paths_by_run.pop(output.run)
        if self._grammar:
            self._grammar.turn()
        self._stuck = {n for n in self._stuck if n >= output.numbers.min(initial=0)}
        paths: list[Sequence[int] | None] = []
        for number in output.numbers.tolist():
            position, path = rows[number]
            beyond = position + 1 - text  # tokens of the path that are not text yet
            assert beyond <= len(path)
            paths.append(path[len(path) - beyond:] if beyond >= 0 else None)
        choices, stuck = self._applied(logits, paths)
        self._stuck |= {int(output.numbers[row]) for row in stuck}
        return choices

    def check(self, sources: Iterable[int]) -> None:
        """Raise UsageError if the text goes on after one of ``sources``, the rows that no token may follow."""
        if not self._stuck.isdisjoint(sources):
            raise UsageError(_STUCK)

    def _applied(self, logits: Logits, paths: Sequence[Sequence[int] | None]) -> tuple[Choices, list[int]]:
        """Apply the request's rules to logits; also return the rows that no token may follow.

        ``paths``: the tokens from the text's end to each row; None: the row cannot become text, and whatever it
        chooses is
        ignored.
        """
        if self._penalties:
            logits = self._penalties.applied(logits, [path or () for path in paths])
        if not self._grammar and not self._restrictions:
            return (logits, None), []
        rows, vocabulary = logits.shape
        masks = np.full((rows, -(-vocabulary // 8)), 0xFF, np.uint8)
        stuck = []
        for row, path in enumerate(paths):
            allowed = None if path is None else self._allowed(path, vocabulary)
            if allowed is None:
                continue
            if allowed.any():
                masks[row] = allowed
            else:
                stuck.append(row)
        return (logits, masks), stuck

    def _allowed(self, path: Sequence[int], vocabulary: int) -> NDArray[np.uint8] | None:
        """Return what the grammar allows, without what is restricted; None: the path cannot follow the answer."""
        allowed = self._grammar.allowed(path) if self._grammar else None
        if self._restrictions is None or (self._grammar and allowed is None):
            return allowed
        unrestricted = self._restrictions.allowed(path, vocabulary)
        return unrestricted if allowed is None else unrestricted & allowed
