"""What a look-up in a text must find, by brute force over the whole text."""

from __future__ import annotations

E = {1: 4.0, 2: 1.0, 3: 0.8}  # and 1/3 from four tokens on


def followers(text: list[int], path: list[int], n: int) -> list[int]:
    """What followed the last n tokens of ``path`` in ``text``, one entry an occurrence."""
    return [text[i] for i in range(n, len(text)) if text[i - n : i] == path[len(path) - n :]]


def brute_force(text: list[int], path: list[int], longest: int, shortest: int) -> dict[int, float]:
    """Every token that the text offers after ``path``, with its estimate."""
    found: dict[int, float] = {}
    left = 1.0
    for n in range(min(longest, len(path)), shortest - 1, -1):
        after = followers(text, path, n)
        if not after:
            continue
        distinct = len(set(after))
        total = len(after) + E.get(n, 1 / 3) * distinct**2
        for token in set(after):
            found.setdefault(token, left * after.count(token) / total)
        left *= 1 - len(after) / total
    return found
