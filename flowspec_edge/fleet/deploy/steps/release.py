"""release: installs the release's files.

    /opt/flowspec/releases/ID/      renamed from ID.partial after a sync
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from flowspec_edge.fleet import paths
from flowspec_edge.fleet.deploy.engine.desired_state import Action, BoardState
from flowspec_edge.fleet.deploy.engine.run import quote
from flowspec_edge.fleet.probe.facts import BoardFacts, ReleaseFacts


def release(state: BoardState, facts: BoardFacts) -> Iterator[Action]:
    link = f"../../venvs/{state.environment.digest}" if state.environment else ""
    if facts.releases.get(state.release) == ReleaseFacts(file_digests(state), link):
        yield Action("release")
        return
    place = paths.release_dir(state.release)
    target, partial, old = quote(place), quote(f"{place}.partial"), quote(f"{place}.old")
    yield Action("release", (
        f"rm -rf {partial} {old} && mkdir {partial}", f"tar -xf - --no-same-owner -C {partial}",
        f"chmod -R u=rwX,go=rX {partial}", *([f"ln -s {quote(link)} {partial}/venv"] if link else []),
        f"sync -f {partial}",  # a power failure could otherwise leave empty files
        f"if [ -e {target} ]; then mv -T {target} {old}; fi", f"mv -T {partial} {target}",
        f"rm -rf {old}"), state.files)


def file_digests(state: BoardState) -> dict[str, str]:
    """The sha256 of the release's files, by path."""
    return {path: hashlib.sha256(text.encode()).hexdigest() for path, text in state.files.items()}
