"""The rules on what boards run, and are to run; ``checks.CHECKS`` says who shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flowspec_edge.boards.probe.facts import BoardFacts
from flowspec_edge.boards.probe.findings import Finding

_DIFFERENT = "the boards have different releases: flowspec deploy up brings all to one"


@dataclass(frozen=True)
class ReleaseOnBoard:
    """The release that a board's python has.

    board_version  its version; "" before the first `flowspec deploy up`
    local_version  this machine's
    error          why the board's does not answer; "" if it does
    """

    python: str
    board_version: str
    local_version: str
    error: str = ""


@dataclass(frozen=True)
class BoardPart:
    """What the cluster file's model asks of one board; bytes.

    needs      of the board's service: weights, caches, and the process
    available  flowspec's own service counted as free; None if the board's ``python`` does not tell
    idle       why the board has no part in the model; "" if it has one
    turn       D0's time for a turn, and a segment's in the slowest stage, in seconds; None for other boards, and
               without profiles
    late       whether the stages would wait for that
    error      in the cluster file
    """

    model: str = ""
    needs: int = 0
    available: int | None = None
    python: str = ""
    idle: str = ""
    turn: tuple[float, float] | None = None
    late: bool = False
    error: str = ""


def release(on_board: ReleaseOnBoard) -> Finding:
    """Judge whether the board has the release that is here, as all boards have to run one."""
    if on_board.error:
        return Finding("flowspec", "failed", on_board.error,
                       f"install this release there, so that {on_board.python} has it")
    if not on_board.board_version:
        return Finding("flowspec", "ok", "not installed yet; flowspec deploy up installs it")
    if on_board.board_version != on_board.local_version:
        return Finding("flowspec", "failed", f"{on_board.board_version}, here {on_board.local_version}",
                       "install the same release on all boards")
    return Finding("flowspec", "ok", on_board.board_version)


def model(part: BoardPart) -> Finding:
    """Judge whether the model fits in the board's free memory."""
    if part.error:
        return Finding("model", "failed", part.error, "see the cluster file")
    if part.idle:
        return Finding("model", "ok", f"this board does nothing: {part.idle}")
    if part.available is None:
        return Finding("model", "unknown", f"{part.python} there does not tell", "see board_python in the cluster file")
    sizes = (f"this board's part of {part.model} needs {part.needs / 1e9:.1f} GB, {part.available / 1e9:.1f} GB are "
             "available")
    if part.needs > part.available:
        return Finding("model", "failed", sizes, "give it fewer layers, or all a shorter context or int4, or "
                                                 "end what else runs there")
    return Finding("model", "ok", sizes)


def draft_device(part: BoardPart) -> Iterator[Finding]:
    """Judge whether the draft device keeps up with the stages."""
    if part.turn is None:
        return
    seconds, slot = part.turn
    times = f"{1e3 * seconds:.3g} ms a turn, the slowest stage {1e3 * slot:.3g} ms, by their profiles"
    if part.late:
        yield Finding("draft device", "warning", f"{times}: the stages will wait for it",
                      "let it compute on its GPU (torch_device), or a faster board draft; measure it with flowspec "
                      "device profile")
    else:
        yield Finding("draft device", "ok", times)


def services(facts: Mapping[str, BoardFacts]) -> Iterator[Finding]:
    """Judge whether every board answers, and its service runs."""
    for name, board in facts.items():
        running = board.running
        if running.error or (running.current and running.state != "active"):
            yield Finding("service", "failed", f"{name} was not reached" if running.current is None else
                          f"{running.current.unit} on {name} is {running.state}", board=name)


def releases(facts: Mapping[str, BoardFacts]) -> Iterator[Finding]:
    """Judge whether there is a release, and one only.

    Boards outside the cluster have none.
    """
    ids = {board.running.current.id for board in facts.values() if board.running.current}
    if len(ids) > 1:
        yield Finding("release", "failed", _DIFFERENT)
    elif not ids and not any(services(facts)):
        yield Finding("release", "failed", "nothing is deployed: flowspec deploy up")


def ready(facts: Mapping[str, BoardFacts]) -> Iterator[Finding]:
    """Judge whether a token came through the pipeline recently."""
    boards = [board.running for board in facts.values()]
    if not any(board.ready for board in boards):
        yield Finding("ready", "failed", next((board.reason for board in boards if board.reason), ""))
