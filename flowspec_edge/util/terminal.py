"""Text for a terminal: from files and peers, made safe, and the known names that a mistyped one may have meant."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from difflib import get_close_matches


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return ``"did you mean a or b? "``, or nothing: to be put before a list of all names."""
    by_lower = {candidate.lower().replace("-", "_"): candidate for candidate in names}
    matches = get_close_matches(name.lower().replace("-", "_"), by_lower, n=2)
    return f"did you mean {' or '.join(by_lower[candidate] for candidate in matches)}? " if matches else ""


# Control and format characters (such as those that reverse the direction of text), line separators, lone
# surrogates, and characters without an agreed appearance.
_UNSAFE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def printable(text: str) -> str:
    r"""Return ``text`` with characters that a terminal may act on as \x1b; line feeds and tabs stay."""
    if text.isprintable():
        return text
    return "".join(_escaped(c) if unicodedata.category(c) in _UNSAFE and c not in "\n\t" else c for c in text)


def plain(text: str) -> str:
    """Return ``text`` for rich: :func:`printable`, and its brackets are no markup."""
    from rich.markup import escape

    return escape(printable(text))


def counted_stages(stages: int) -> str:
    """Return ``"1 stage"``, ``"4 stages"``."""
    return f"{stages} stage{'s' if stages != 1 else ''}"


def no_control_characters(text: str) -> str:
    """Return a validator, which raises ValueError."""
    if printable(text) != text:
        raise ValueError(f"{printable(text)} has characters that a terminal acts on")
    return text


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
