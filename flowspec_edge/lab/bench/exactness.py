"""How many answers and tokens are not those of plain decoding, and in which types of numbers they were made.

In fp32 there is none, or the run fails.  In 16 bits near ties (``bench.near_ties``) explain a difference;
that does not make the answers the same, so every table counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec_edge.lab.bench.samples import Sample
from flowspec_edge.model.manifest import types_text

PLAIN = "autoregressive"
MARKS = ("answers ≠, tokens ≠: those that are not plain decoding's with the unsharded model; ≈: near ties of "
         "16 bits explain it, ≠: nothing does")


@dataclass(frozen=True)
class Exactness:
    """How many answers and tokens are not plain decoding's.

    different_tokens  places at which a token is not plain decoding's; None: not known, in older files
    near_ties         of the different answers, those that near ties explain
    """

    answers: int
    different_answers: int
    tokens: int
    different_tokens: int | None
    near_ties: int

    @property
    def mark(self) -> str:
        return mark_of(self.different_answers, self.near_ties)

    @property
    def tokens_text(self) -> str:
        return f"{'?' if self.different_tokens is None else self.different_tokens}/{self.tokens}"

    @property
    def answers_text(self) -> str:
        """Write the count of different answers with its mark."""
        return f"{self.different_answers}/{self.answers} {self.mark}".rstrip()


def mark_of(different_answers: int | None, near_ties: int | None) -> str:
    """Return the mark beside a figure: "≠" if an answer is wrong, "≈" if near ties alone made answers differ.

    It is "" for no difference, and also if that is not known.
    """
    if not different_answers:
        return ""
    return "≈" if different_answers == near_ties else "≠"


def exactness(samples: Iterable[Sample]) -> Exactness:
    answers = list(samples)
    differing = [s.different_tokens for s in answers]
    counts = [count for count in differing if count is not None]
    return Exactness(len(answers), sum(not s.identical for s in answers), sum(s.tokens for s in answers),
                     sum(counts) if len(counts) == len(differing) else None, sum(s.near_ties for s in answers))


def types_of(settings: Mapping[str, Any]) -> str:
    """Name the types of a measurement: of the weights, which older files do not name, and of the arithmetic."""
    return types_text(str(settings.get("dtype")), settings.get("weights"))


def exactness_text(samples: Sequence[Sample], settings: Mapping[str, Any]) -> str:
    """Say in a sentence how exact the texts of all methods are, and name the methods with differences."""
    overall = exactness(samples)
    summary = (f"{overall.different_answers} of {overall.answers} answers and {_count(overall.different_tokens)} of "
               f"{overall.tokens} tokens differ from plain decoding's ({types_of(settings)})")
    if not overall.different_answers:
        return f"{summary}."
    methods = {name: exactness(s for s in samples if s.strategy == name)
               for name in dict.fromkeys(s.strategy for s in samples)}
    differences = ", ".join(f"{name} {method.answers_text} answers, {method.tokens_text} tokens"
                            for name, method in methods.items() if method.different_answers)
    differences += _through_stages(samples)
    why = "near ties of 16 bits explain all of them (≈)" if overall.mark == "≈" else \
        f"near ties of 16 bits explain {overall.near_ties} of them (≈), nothing explains the others (≠)"
    return f"{summary}: {differences}; {why}."


def _through_stages(samples: Sequence[Sample]) -> str:
    """Answers that are not autoregressive decoding's through the same stages, if these can be told."""
    plainly = [s for s in samples if s.strategy == PLAIN]
    answers = {_answer_key(s): s.answer for s in plainly}
    others = [s for s in samples if s.strategy != PLAIN and _answer_key(s) in answers]
    if not others or len(answers) < len(plainly) or not all(s.answer for s in (*plainly, *others)):
        return ""
    counts = []
    for name in dict.fromkeys(s.strategy for s in others):
        strategy_samples = [s for s in others if s.strategy == name]
        different = sum(s.answer != answers[_answer_key(s)] for s in strategy_samples)
        counts.append(f"{name} {different}/{len(strategy_samples)}")
    return f"; answers that are not {PLAIN}'s through the same stages: {', '.join(counts)}"


def _answer_key(sample: Sample) -> tuple[str, float, int, int]:
    return sample.task, sample.temperature, sample.repeat, sample.prompt


def _count(number: int | None) -> str:
    return "an unknown number" if number is None else str(number)
