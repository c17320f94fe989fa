"""Penalties on the target's logits, by what an answer has written.

The counts of a row are those of the answer up to that row, which its own path in the draft tree determines,
so every strategy chooses the same tokens. A change depends on a count alone, never on how the count came to
be: rounding is the same, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flowspec_edge.sampling.settings import Penalties
from flowspec_edge.sampling.top_values import wide


class AnswerPenalties:
    """The penalties of one answer, which grows."""

    def __init__(self, penalties: Penalties) -> None:
        self._penalties = penalties
        self._counts = Counter[int]()
        self._changes: Tensor | None = None  # [V], of the logits after the answer
        self._outdated = {*penalties.logit_bias}  # tokens

    def extend(self, tokens: Iterable[int]) -> None:
        """The answer continues with ``tokens``."""
        for token in tokens:
            self._counts[token] += 1
            self._outdated.add(token)

    @torch.inference_mode()
    def applied(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """``logits`` [n, V] with the changes, at least float32. ``paths``: of each row, the tokens between
        the answer and the row's successor."""
        logits = wide(logits)
        if self._changes is None:
            self._changes = logits.new_zeros(logits.shape[-1])
        if self._outdated:
            tokens = sorted(self._outdated)
            self._changes[torch.tensor(tokens, device=logits.device)] = logits.new_tensor(
                [self._penalties.change(token, self._counts[token]) for token in tokens])
            self._outdated.clear()
        changed = logits + self._changes
        places = [(row, token, self._penalties.change(token, self._counts[token] + more))
                  for row, path in enumerate(paths) for token, more in Counter(path).items()]
        if places:
            rows, columns, values = zip(*places, strict=True)
            at = torch.tensor(rows, device=logits.device), torch.tensor(columns, device=logits.device)
            changed[at] = logits[at] + logits.new_tensor(values)
        return changed
