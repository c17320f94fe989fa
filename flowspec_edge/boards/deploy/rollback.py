"""Returns all boards to the previous release, or removes the services."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flowspec_edge.boards.commands import as_root, on_each, python_for, runner_for
from flowspec_edge.boards.deploy.actions import BoardState, Phase
from flowspec_edge.boards.deploy.rollout_log import DeployReport, RolloutLog, Watch
from flowspec_edge.boards.inventory import DeviceEntry, Inventory
from flowspec_edge.boards.paths import CURRENT, PREVIOUS, release_dir
from flowspec_edge.boards.probe.facts import BoardStatus, Installed
from flowspec_edge.boards.services.keys import board_public_keys, forget
from flowspec_edge.boards.services.status import FleetStatus, look
from flowspec_edge.errors import FlowspecError

_MIXED = ("boards may have different releases, or none; stages that reach the draft device follow its "
          "release: see flowspec deploy status; flowspec deploy up brings all to one")


def roll_back(inventory: Inventory, watch: Watch | None = None) -> DeployReport:
    """Activate the previous release on all boards.

    A second call activates the newer one again; after an interrupted call, it completes the rollback instead.

    If a board does not answer, no board is touched, and the report names those that do not.

    Raise FlowspecError if the boards' previous releases are missing, differ, or have never made a token.  Boards
    without a release are skipped, because they are not part of the cluster.
    """
    status = look(inventory)
    log = RolloutLog(inventory, [], watch or Watch())
    if not log.answered(status):
        return log.report()
    if not any(board.current for board in status.boards):
        raise FlowspecError("nothing is deployed: flowspec deploy up")
    befores = interrupted(status) or {board.name: board.previous for board in _members(status)}
    absent = [name for name, release in befores.items() if release is None]
    if absent:
        raise FlowspecError(f"{', '.join(absent)}: there is no release before this one; deploy the one "
                            "that you want, with: flowspec deploy up")
    if untried := {release.id for release in befores.values() if release and not release.tried}:
        raise FlowspecError(f"release {untried.pop()}, which was deployed last, has never become ready: "
                            "deploy the one that you want, with: flowspec deploy up; no board was touched")
    ids = {name: release.id for name, release in befores.items() if release}
    if len(set(ids.values())) > 1:
        pairs = ", ".join(f"{name} {release}" for name, release in ids.items())
        raise FlowspecError(f"the boards' releases before this one differ ({pairs}): deploy the one that you "
                            "want, with: flowspec deploy up")
    required_keys = {board.name: target.public_key for board in status.boards
                     if (target := befores.get(board.name)) and _has_another_key(board)}
    rotated = [device for device in inventory.device if device.name in required_keys]
    pythons = {device.name: python_for(inventory, device) for device in rotated}
    board_keys = board_public_keys(inventory, rotated, pythons)
    if without_key := [name for name, key in required_keys.items() if key not in board_keys[name]]:
        raise FlowspecError(f"{', '.join(without_key)}: the keys were rotated since the release before this one, "
                            "which needs the former ones; deploy what you want with: flowspec deploy up; "
                            "no board was touched")
    log.include(befores)
    activate(inventory, befores, log)
    return log.report(next(iter(ids.values())), after_failure=f"{_MIXED}; to continue: flowspec deploy rollback")


def interrupted(status: FleetStatus) -> dict[str, Installed | None] | None:
    """Return the releases of a rollback that was not completed; None if there was none.

    The draft device switches last.  Until it has switched, the rollback's target is its previous release.  A
    stage that was switched and found the draft device with the newer release has returned to that one: then
    nothing is left of the rollback but its mark.
    """
    if status.release is not None and any(board.going_back == status.release for board in status.boards):
        return {board.name: board.current for board in status.boards if board.current}
    members, targets = _members(status), _targets(status)
    if status.release is not None or len(targets) != 1:
        return None
    releases: dict[str, Installed | None] = {
        board.name: release for board in members for release in (board.previous, board.current)
        if release and release.id in targets}
    return releases if len(releases) == len(members) else None


def _targets(status: FleetStatus) -> set[str]:
    """Return the id of the draft device's release before this one; empty if it has none."""
    return {board.previous.id for board in status.boards
            if board.previous and board.current and board.current.role == "draft"}


def _members(status: FleetStatus) -> list[BoardStatus]:
    """Return the boards of the cluster: those with a release, and those that the release before this one used.

    The latter had a release when the draft device's release before this one ran, and this one does not use them.
    """
    targets = _targets(status)
    return [board for board in status.boards
            if board.current or (board.previous and board.previous.id in targets)]


def _has_another_key(board: BoardStatus) -> bool:
    """Return whether the previous release needs another key pair, which only an unfinished rotation leaves there."""
    if not (board.current and board.previous):
        return False
    now, before = board.current.public_key, board.previous.public_key
    return bool(now and before) and now != before


def go_back(inventory: Inventory, before: FleetStatus, log: RolloutLog) -> tuple[str | None, str]:
    """Undo a failed rollout.

    Return the id of the release that runs again, if any, and a sentence for the report.
    """
    releases = releases_before(before)
    undo = RolloutLog(inventory, releases, log.watch)
    spare = [(device, BoardState(device.name)) for device in inventory.device
             if releases[device.name] is None]
    undo.run("down", spare, "stopping what did not become ready")
    activate(inventory, releases, undo)
    log.add(undo, "going back")
    if undo.failed:
        return None, _MIXED
    _restore_links(inventory, before, releases)
    ids = {release.id for release in releases.values() if release}
    if not ids:
        return None, "no release was there before it to go back to, so its services are stopped"
    if len(ids) > 1:
        return None, "the boards run again what they ran before, each its own release"
    release, stopped_boards = ids.pop(), [device.name for device, _ in spare]
    if stopped_boards:
        return release, f"release {release} runs again where it ran, and nothing on {', '.join(stopped_boards)}"
    return release, f"release {release} runs again on all boards"


def releases_before(status: FleetStatus) -> dict[str, Installed | None]:
    """Return the release to which each board returns.

    A board returns to the last release that made a token on the draft device if it has that one, otherwise to its
    current one.  The two differ on boards that an interrupted rollout had switched.
    """
    last_tried = {last.id for board in status.boards if (last := _last_tried(board))}
    return {board.name: next((release for release in (board.current, board.previous)
                              if release and release.id in last_tried), board.current) for board in status.boards}


def _last_tried(board: BoardStatus) -> Installed | None:
    """Return a draft device's last release that made a token, the current one if none has; None for a stage."""
    if board.current is None or board.current.role != "draft":
        return None
    if board.current.tried or board.ready:
        return board.current
    before = board.previous
    return before if before and before.role == "draft" and before.tried else board.current


def activate(inventory: Inventory, releases: Mapping[str, Installed | None], log: RolloutLog) -> None:
    """Run releases that are already on the boards, in the order of ``steps.activate``."""
    states = {role: [(device, BoardState(device.name, release=release.id, unit=release.unit, back=True))
                     for device in inventory.device
                     if (release := releases.get(device.name)) is not None and release.role == role]
              for role in ("verify", "draft")}
    phases: tuple[tuple[Phase, str, str], ...] = (
        ("switch", "verify", "switching"), ("switch", "draft", "switching the draft device"),
        ("activate", "verify", "stages"),
        ("activate", "draft", "the draft device, until a token comes through"))
    for phase, role, title in phases:
        if not log.run(phase, states[role], f"back to the release before: {title}"):
            return  # the draft device would wait for a token that cannot come
    for role in ("draft", "verify"):  # the stages' marks go last: they tell of a rollback that has not ended
        if not log.run("settle", states[role], "settling"):
            return


def take_down(inventory: Inventory, keys: Path, purge: bool = False, watch: Watch | None = None
              ) -> DeployReport:
    """Stop and remove the services.

    purge  remove all of flowspec's files, and the public keys in ``keys``

    If a board does not answer, no board is touched, and the report names those that do not.
    """
    log = RolloutLog(inventory, [device.name for device in inventory.device], watch or Watch())
    if not log.answered(look(inventory)):
        return log.report()
    states = [(device, BoardState(device.name)) for device in inventory.device]
    if log.run("down", states, "stopping services") and purge:
        log.run("purge", states, "removing everything")
        forget(keys, (device.name for device in inventory.device if not log.error(device.name)))
    again = "flowspec deploy down --purge" if purge else "flowspec deploy down"
    return log.report(after_failure=f"boards without an error are down; to continue: {again}")


def _restore_links(inventory: Inventory, before: FleetStatus, releases: Mapping[str, Installed | None]
                   ) -> None:
    """Restore ``previous`` on all boards, so that no later rollback activates a release that was never ready.

    Boards on which this fails are skipped.
    """
    def restore(pair: tuple[DeviceEntry, BoardStatus]) -> None:
        device, status = pair
        command = ["rm", "-f", PREVIOUS]
        if status.previous and status.previous != releases[device.name]:
            command = ["ln", "-sfn", release_dir(status.previous.id), PREVIOUS]
        elif not status.current:
            command.append(CURRENT)
        try:
            runner_for(inventory, device).run(as_root(command))
        except FlowspecError:
            return

    on_each(restore, [*zip(inventory.device, before.boards, strict=True)])
