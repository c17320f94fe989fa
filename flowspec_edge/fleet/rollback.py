"""From the release that runs to the one before it; and from any to none.

Knows that all boards go together, or none does.  Does not know how a release came to be (``rollout``).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet.board_keys import forget
from flowspec_edge.fleet.commands import as_root
from flowspec_edge.fleet.desired import BoardState, Reach
from flowspec_edge.fleet.inventory import DeviceEntry, Inventory
from flowspec_edge.fleet.places import CURRENT, PREVIOUS, release_dir
from flowspec_edge.fleet.rollout_books import Books
from flowspec_edge.fleet.rollout_report import Report, Watch
from flowspec_edge.fleet.services import BoardStatus, FleetStatus, Installed, board_runner, look

_MIXED = ("boards may run different releases, or none: see flowspec deploy status; flowspec deploy up brings "
          "all to one")


def reach_of(inventory: Inventory, device: DeviceEntry) -> Reach:
    """How the engine gets to a board."""
    return Reach(device.address, device.ssh_port, device.ssh_user, device.ssh_key,
                 inventory.cluster.ssh_config)


def roll_back(inventory: Inventory, watch: Watch | None = None) -> Report:
    """Bring all boards to the release before the one that runs; again, and they are where they were.

    FlowspecError if a board cannot be reached, or has none, or another than the others.  Boards without any
    release are left alone: the cluster leaves them out.
    """
    status = look(inventory)
    _require_answers(status)
    if not any(board.current for board in status.boards):
        raise FlowspecError("nothing is deployed: flowspec deploy up")
    befores = {board.name: board.previous for board in status.boards if board.current or board.previous}
    absent = [name for name, release in befores.items() if release is None]
    if absent:
        raise FlowspecError(f"{', '.join(absent)}: there is no release before this one; deploy the one "
                            "that you want, with: flowspec deploy up")
    ids = {name: release.id for name, release in befores.items() if release}
    if len(set(ids.values())) > 1:
        told = ", ".join(f"{name} {release}" for name, release in ids.items())
        raise FlowspecError(f"the boards' releases before this one differ ({told}): deploy the one that you "
                            "want, with: flowspec deploy up")
    books = Books(befores, watch or Watch())
    activate(inventory, befores, books)
    return books.report(next(iter(ids.values())), left=_MIXED)


def go_back(inventory: Inventory, before: FleetStatus, books: Books) -> tuple[str | None, str]:
    """A release did not become ready: boards run again what they ran ``before``, or nothing where that was
    nothing; ``previous`` is then what it was.

    The id of the release that runs again, None without one; and how the boards are left, in words.
    """
    releases = {board.name: board.current for board in before.boards}
    own = Books(releases, books.watch)
    spare = [BoardState(device.name, reach_of(inventory, device)) for device in inventory.device
             if releases[device.name] is None]
    own.run("down", spare, "stopping what did not become ready")
    activate(inventory, releases, own)
    _restore_links(inventory, before)
    books.add(own, "going back")
    if own.failed:
        return None, _MIXED
    ids = {release.id for release in releases.values() if release}
    if not ids:
        return None, "no release was there before it to go back to, so its services are stopped"
    if len(ids) > 1:
        return None, "the boards run again what they ran before, each its own release"
    release, stopped = ids.pop(), [state.name for state in spare]
    if stopped:
        return release, f"release {release} runs again where it ran, and nothing on {', '.join(stopped)}"
    return release, f"release {release} runs again on all boards"


def activate(inventory: Inventory, releases: Mapping[str, Installed | None], books: Books) -> None:
    """Releases that lie on the boards already become those that run: stages first, then the draft device."""
    for role, says in (("verify", "stages"), ("draft", "the draft device, until a token comes through")):
        states = [BoardState(device.name, reach_of(inventory, device), release=release.id, unit=release.unit)
                  for device in inventory.device
                  if (release := releases.get(device.name)) is not None and release.role == role]
        if not books.run("activate", states, f"back to the release before: {says}"):
            return  # the draft device would wait for a token that cannot come


def take_down(inventory: Inventory, keys: Path, purge: bool = False, watch: Watch | None = None) -> Report:
    """Services neither run nor come back; with ``purge`` nothing of flowspec is left on the boards, nor are
    their keys in ``keys``, the directory of the public ones.

    FlowspecError if a board cannot be reached: then none is touched.
    """
    _require_answers(look(inventory))
    books = Books([device.name for device in inventory.device], watch or Watch())
    states = [BoardState(device.name, reach_of(inventory, device)) for device in inventory.device]
    if books.run("down", states, "stopping services") and purge:
        books.run("purge", states, "removing everything")
        forget(keys, (state.name for state in states if not books.error(state.name)))
    again = "flowspec deploy down --purge" if purge else "flowspec deploy down"
    return books.report(left=f"boards without an error are down; {again} goes on from here")


def _require_answers(status: FleetStatus) -> None:
    if silent := [board for board in status.boards if board.error]:
        raise FlowspecError("; ".join(board.error for board in silent) + "; no board was touched")


def _restore_links(inventory: Inventory, before: FleetStatus) -> None:
    """A release that never was ready is none to go back to.  Of no weight: a board that fails is left."""
    def restore(pair: tuple[DeviceEntry, BoardStatus]) -> None:
        device, status = pair
        command = ["rm", "-f", PREVIOUS]
        if status.previous:
            command = ["ln", "-sfn", release_dir(status.previous.id), PREVIOUS]
        elif not status.current:
            command.append(CURRENT)
        try:
            board_runner(inventory, device).run(as_root(command))
        except FlowspecError:
            return

    with ThreadPoolExecutor(len(before.boards)) as pool:
        list(pool.map(restore, zip(inventory.device, before.boards, strict=True)))
