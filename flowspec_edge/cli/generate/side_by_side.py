"""Answers to one question beside one another, each as it streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_NARROWEST = 36  # columns of an answer; a narrower terminal shows one below the other
_A_SECOND = 12  # frames


@dataclass
class _Answer:
    title: str
    text: str = ""
    tokens: int = 0
    first: float | None = None  # when the first tokens came
    last: float = 0.0

    def add(self, tokens: Sequence[int], at: float | None = None) -> None:
        self.last = time.monotonic() if at is None else at
        self.first = self.last if self.first is None else self.first
        self.tokens += len(tokens)

    @property
    def speed(self) -> str:
        if self.first is None or self.last <= self.first:
            return " "
        seconds = self.last - self.first
        return f"{self.tokens} tokens in {seconds:.1f} s: {(self.tokens - 1) / seconds:.1f} tokens/s"


class CountTokens(Protocol):
    def __call__(self, tokens: Sequence[int], at: float | None = None) -> None:
        """Count new tokens; ``at``: their time in seconds, by default now."""


class SideBySide:
    """The answers on a terminal, a column each, below it how many tokens came how fast.

    Without a terminal each answer is a paragraph, which streams, too: one answer after the other.
    """

    def __init__(self, console: Console, titles: Sequence[str]) -> None:
        self._console = console
        self._answers = [_Answer(title) for title in titles]
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the columns within the block, while answers stream."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._render, console=self._console, refresh_per_second=_A_SECOND,
                  vertical_overflow="visible") as self._live:
            yield

    @contextmanager
    def answer(self, number: int) -> Iterator[tuple[Callable[[str], None], CountTokens]]:
        """Yield what to call with the answer's text, and with its tokens, as they come."""
        column = self._answers[number]

        def write(text: str) -> None:
            column.text += text
            if self._live is None:
                self._console.print(text, markup=False, end="", soft_wrap=True)

        if self._live is None:
            self._console.print(f"[bold]{column.title}[/bold]")
        yield write, column.add
        if self._live is None:
            self._console.print(f"\n[dim]{column.speed}[/dim]\n")

    def _render(self) -> RenderableType:
        width = self._console.width // len(self._answers) - 2
        parts = [Group(Text(answer.title, style="bold"), Text(answer.text), Text(answer.speed, style="dim"))
                 for answer in self._answers]
        if width < _NARROWEST:
            return Group(*parts)
        columns = Table.grid(padding=(0, 2), expand=True)
        for _ in parts:
            columns.add_column(ratio=1)
        columns.add_row(*parts)
        return columns
