"""In which line of a TOML file a key stands.

tomllib says what a file holds, not where.  This walks over a text that tomllib has accepted, and notes
where each table, key and array element begins.  Does not check anything, nor know what values mean.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Where = tuple[str | int, ...]  # keys from the file's top down, and places in arrays, counted from 0

_SPACE = re.compile(r"[ \t]*")
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")  # lines, too, and comments
_BARE = re.compile(r"[^\s.=\]]+")
_SCALAR = re.compile(r"[^,\]}#\n]+")  # numbers, booleans, dates
_STRING = re.compile(  # the quotes that end one of several lines may follow one or two of its own
    r'''"""(?:\\.|[^\\])*?""""{0,2}|\'\'\'.*?\'\'\'\'{0,2}|"(?:\\.|[^"\\])*"|'[^']*\'''', re.DOTALL)


def key_lines(text: str) -> dict[Where, int]:
    """The line, counted from 1, of everything in ``text``, which must be valid TOML: ("device", 1) is
    where the second [[device]] begins, ("device", 1, "name") where its name is given."""
    return _Walk(text.replace("\r\n", "\n")).lines


def nearest_line(lines: Mapping[Where, int], where: Sequence[str | int]) -> int | None:
    """The line of ``where``, or of the innermost thing around it that has one; None for the whole file."""
    place = tuple(where)
    return next((lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines), None)


class _Walk:
    """One pass over ``text``; ``lines`` is what it found."""

    def __init__(self, text: str) -> None:
        self.lines: dict[Where, int] = {}
        self._text, self._at = text, 0
        self._ends = [match.start() for match in re.finditer("\n", text)]
        self._elements: dict[Where, int] = {}  # of arrays of tables: how many so far
        table: Where = ()
        self._skip(_BLANK)
        while self._at < len(text):
            if text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip(_BLANK)

    def _header(self) -> Where:
        """[a.b] or [[a.b]]; the table that it begins."""
        line, many = self._line(), self._text.startswith("[[", self._at)
        self._at += 1 + many
        *outer, last = self._key()
        self._at += 1 + many
        table: Where = ()
        for part in outer:
            table = (*table, part)
            self.lines.setdefault(table, line)
            if table in self._elements:  # of an array of tables the one that is being written
                table = (*table, self._elements[table] - 1)
        table = (*table, last)
        if many:
            self.lines.setdefault(table, line)
            place = self._elements.get(table, 0)
            self._elements[table] = place + 1
            table = (*table, place)
        self.lines[table] = line
        return table

    def _pair(self, table: Where) -> None:
        """key = value; the key may have dots."""
        line, where = self._line(), table
        for part in self._key():
            where = (*where, part)
            self.lines.setdefault(where, line)
        self._at += 1  # =
        self._skip(_SPACE)
        self._value(where)

    def _key(self) -> list[str]:
        parts = []
        while True:
            self._skip(_SPACE)
            quoted = self._text[self._at] in "\"'"
            part = self._skip(_STRING if quoted else _BARE)
            parts.append(str(tomllib.loads(f"key = {part}")["key"]) if quoted else part)
            self._skip(_SPACE)
            if self._text[self._at] != ".":
                return parts
            self._at += 1

    def _value(self, where: Where) -> None:
        opening = self._text[self._at]
        if opening not in "[{":
            self._skip(_STRING if opening in "\"'" else _SCALAR)
            return
        self._at += 1
        self._skip(_BLANK)
        place = 0
        while self._text[self._at] not in "]}":
            if opening == "{":
                self._pair(where)
            else:
                self.lines[(*where, place)] = self._line()
                self._value((*where, place))
                place += 1
            self._skip(_BLANK)
            if self._text[self._at] == ",":
                self._at += 1
                self._skip(_BLANK)
        self._at += 1

    def _line(self) -> int:
        return bisect_right(self._ends, self._at - 1) + 1

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Go past what is here; the text of it."""
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return match.group()
