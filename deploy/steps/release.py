"""release: the release's own files.  Disturbs nothing that runs.

    /opt/flowspec/releases/ID/      renamed from ID.partial when it is whole
"""

from __future__ import annotations

import hashlib

from flowspec_edge.fleet import places
from flowspec_edge.fleet.engine_board import Board, quote


def release(board: Board) -> None:
    """The state's files and the link to their environment, and nothing else in the directory."""
    state = board.state
    place = places.release_dir(state.release)
    link = f"../../venvs/{state.environment.digest}" if state.environment else ""
    wanted = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in state.files.items()}
    linked = "".join(board.ask(f"readlink {quote(f'{place}/venv')} || true"))
    if board.digests(place) == wanted and linked == link:
        board.unchanged("release")
        return
    partial, old = quote(f"{place}.partial"), quote(f"{place}.old")
    board.send_texts("release", state.files, " && ".join([
        f"rm -rf {partial} {old}", f"mkdir {partial}", f"tar -xf - --no-same-owner -C {partial}",
        f"chmod -R u=rwX,go=rX {partial}", *([f"ln -s {quote(link)} {partial}/venv"] if link else []),
        f"if [ -e {quote(place)} ]; then mv -T {quote(place)} {old}; fi",
        f"mv -T {partial} {quote(place)}", f"rm -rf {old}"]))
