"""The known names that a mistyped one may have meant."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


def did_you_mean(name: str, known: Collection[str]) -> str:
    """``"did you mean a or b? "``, or nothing: to be put before a list of all names."""
    by_lower = {one.lower().replace("-", "_"): one for one in known}
    found = get_close_matches(name.lower().replace("-", "_"), by_lower, n=2)
    return f"did you mean {' or '.join(by_lower[one] for one in found)}? " if found else ""
