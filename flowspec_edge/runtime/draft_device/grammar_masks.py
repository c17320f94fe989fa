"""The tokens that a grammar allows after each row of the draft tree, by the row's own path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.messages import Output, Segment, unpack_bits
from flowspec_edge.model.grammar import GrammarState


class GrammarMasks:
    """Knows the paths of the rows in flight; computes their masks when they return."""

    def __init__(self, state: GrammarState, vocabulary: int) -> None:
        """``state``: the grammar's at the newest token of the text."""
        self._state = state
        self._vocabulary = vocabulary
        self._sent: dict[int, dict[int, tuple[int, list[int]]]] = {}  # run -> number -> position, path
        self._paths: dict[int, list[int]] = {}  # number -> tokens of its uncommitted ancestors and its own

    def sent(self, segment: Segment) -> None:
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
        self._sent[segment.run] = rows

    def first(self) -> NDArray[np.bool_]:
        """The mask of the newest token of the text: bool [1, V]."""
        allowed = self._state.allowed(())
        assert allowed is not None
        return allowed[None]

    def returned(self, output: Output, text: int) -> NDArray[np.bool_]:
        """The masks of an output's rows, bool [n, V]; ``text``: tokens of prompt and answer. Everything is
        allowed after rows that cannot become text."""
        rows = self._sent.pop(output.run)
        self._state.turn()
        masks = np.ones((len(output.numbers), self._vocabulary), np.bool_)
        for mask, number in zip(masks, output.numbers.tolist(), strict=True):
            position, path = rows[number]
            beyond = position + 1 - text  # tokens of the path that are not text yet
            assert beyond <= len(path)
            found = self._state.allowed(path[len(path) - beyond:]) if beyond >= 0 else None
            if found is not None:
                mask[:] = found
        return masks
