"""How many tokens of a prompt a segment carries.

A prompt of T tokens goes through N stages in T / c segments of c rows.  With t(c) for a segment in the slowest stage,
the first token comes after about (T / c + N - 1) t(c): large segments read weights and cache less often, small ones
fill the pipeline sooner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

USUAL = 64  # rows, where no times are known
MOST = 512  # rows: more wait for longer than they gain, also where a stage has memory for them
STEP = 16  # rows that GPUs and int4 products compute together


class PromptSeconds(Protocol):
    """The time of a prompt's segment in the slowest stage, with the link after it."""

    def __call__(self, rows: int, context: int, /) -> float: ...


@dataclass(frozen=True)
class PromptCurve:
    """The stages' times of a prompt's segments; ``most``: rows for which every stage has memory."""

    seconds: PromptSeconds
    most: int = MOST

    def chunk(self, tokens: int, stages: int, cached: int = 0) -> int:
        """Return the rows of a segment with which a prompt of ``tokens`` has its first token soonest.

        cached  rows of the text before them that the stages have already
        """
        longest = min(max(self.most, STEP), -(-tokens // STEP) * STEP)

        def first_token(rows: int) -> float:
            full_chunks, remainder = divmod(tokens, rows)
            parts = full_chunks * self.seconds(min(rows, tokens), cached + max(0, tokens - remainder - rows) // 2)
            parts += self.seconds(remainder, cached + tokens - remainder) if remainder else 0.0
            return parts + (stages - 1) * self.seconds(min(rows, tokens), cached + max(0, tokens - rows))

        return min(range(STEP, longest + 1, STEP), key=first_token)
