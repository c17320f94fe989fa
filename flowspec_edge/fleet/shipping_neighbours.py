"""Which board has which file already, and so can give it to another.

Knows one rule: a large file that a neighbour has, or is to get from here, comes from the neighbour.  So
nothing large leaves the control host twice, wherever that is: its one link serves all boards, and theirs
are all of one switch.  Does not know how it travels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flowspec_edge.manifest import PartFile

_LARGE = 4 << 20  # bytes; below, starting a server on the neighbour takes longer than sending


def large(files: Iterable[PartFile]) -> list[str]:
    """The sha256 of those that may come from a neighbour."""
    return sorted({file.sha256 for file in files if file.size >= _LARGE})


@dataclass
class _Claim:
    """A file that one board gets from here, and others wait for."""

    board: str
    over: threading.Event = field(default_factory=threading.Event)


class Neighbours:
    """Used by several threads, one a board."""

    def __init__(self, held: Mapping[str, Iterable[str]], missing: Mapping[str, Iterable[str]]) -> None:
        """Both by board: sha256 of the large files that it has, and of those that it lacks."""
        self._lock = threading.Lock()
        self._has: dict[str, list[str]] = {}
        self._claims: dict[str, _Claim] = {}
        self._ports = {board: threading.Lock() for board in held}
        for board, files in held.items():
            for sha256 in files:
                self._has.setdefault(sha256, []).append(board)
        for board, files in missing.items():
            for sha256 in files:
                if sha256 not in self._has:
                    self._claims.setdefault(sha256, _Claim(board))

    def waits(self, board: str, sha256: str) -> bool:
        """Whether ``board`` is to get the file from a neighbour."""
        claim = self._claims.get(sha256)
        return sha256 in self._has or (claim is not None and claim.board != board)

    def source(self, board: str, sha256: str) -> str | None:
        """The neighbour that has it, once it has; None: it comes from here."""
        claim = self._claims.get(sha256)
        if claim is not None and claim.board != board:
            claim.over.wait()
        with self._lock:
            return next((name for name in self._has.get(sha256, ()) if name != board), None)

    def arrived(self, board: str, sha256: str) -> None:
        """It has the file, whole; a small one is not worth a neighbour's while."""
        claim = self._claims.get(sha256)
        with self._lock:
            if claim is None and sha256 not in self._has:
                return
            self._has.setdefault(sha256, []).append(board)
        if claim is not None and claim.board == board:
            claim.over.set()

    def gone(self, board: str) -> None:
        """It gets nothing more: whoever waits for what it was to get gets that elsewhere."""
        for claim in self._claims.values():
            if claim.board == board:
                claim.over.set()

    def port(self, board: str) -> threading.Lock:
        """To be held while ``board`` serves a file: it has one port for that."""
        return self._ports[board]
