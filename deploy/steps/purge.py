"""purge: nothing of flowspec is left on the board, but the Debian packages, which others may need."""

from __future__ import annotations

from pyinfra.operations import files, server
from steps.services import down

from flowspec_edge.fleet import places
from flowspec_edge.fleet.engine_board import Board


def purge(board: Board) -> None:
    """The whole phase."""
    down(board)
    for path in (places.HOME, places.STATE, places.CACHE, places.ETC):
        board.do(f"{path} removed", files.directory, path=path, present=False)
    board.do(f"user {places.USER} removed", server.user, user=places.USER, present=False)
    if board.state.packages:
        board.unchanged(f"left as they are: Debian packages {', '.join(board.state.packages)}")
