"""Where a rollback leads that was interrupted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowspec_edge.boards.deploy.rollback import interrupted, releases_before
from flowspec_edge.boards.probe.facts import BoardStatus, Installed
from flowspec_edge.boards.services.status import FleetStatus


def fleet(*boards: tuple[str, str], untried: str = "") -> FleetStatus:
    """(current, previous) of the draft device and the stages; "" without one."""
    def installed(place: int, release: str) -> Installed | None:
        role = "verify" if place else "draft"
        return Installed(release, role, place, tried=bool(place) or release != untried) if release else None

    return FleetStatus([BoardStatus(f"board-{place}", installed(place, current), installed(place, previous))
                        for place, (current, previous) in enumerate(boards)])


@pytest.mark.parametrize("boards", [
    [("new", "old"), ("new", "old")],  # not begun, or complete
    [("new", "old"), ("other", "new")],  # an interrupted upgrade to "other"
    [("new", ""), ("old", "new")],
    [("", ""), ("", "")],
    [("new", "old"), ("new", "old"), ("", "old")],  # "new" does not use the third board
])
def test_no_rollback_was_interrupted(boards: list[tuple[str, str]]) -> None:
    assert interrupted(fleet(*boards)) is None


def test_a_rollback_with_all_boards_switched_is_completed() -> None:
    status = fleet(("old", "new"), ("old", "new"), ("", ""))
    status.boards[1] = replace(status.boards[1], going_back="old")
    found = interrupted(status)
    assert found is not None
    assert {name: release and release.id for name, release in found.items()} == {
        "board-0": "old", "board-1": "old"}


def test_a_board_that_the_newer_release_does_not_use_goes_back_with_the_others() -> None:
    found = interrupted(fleet(("new", "old"), ("old", "new"), ("", "old"), ("", "older")))
    assert found is not None
    assert {name: release and release.id for name, release in found.items()} == dict.fromkeys(
        ("board-0", "board-1", "board-2"), "old")


def test_a_rollback_that_its_only_switched_stage_left_begins_anew() -> None:
    """The stage rebooted, and the draft device's release, not switched yet, took it back."""
    status = fleet(("new", "old"), ("new", "old"))
    status.boards[1] = replace(status.boards[1], going_back="old")
    assert interrupted(status) is None


@pytest.mark.parametrize(("boards", "before"), [
    ([("new", "old"), ("new", "old")], ["new", "new"]),
    ([("old", "older"), ("new", "old"), ("old", "older")], ["old", "old", "old"]),  # an interrupted upgrade
    ([("old", ""), ("new", "other"), ("", "")], ["old", "new", None]),
])
def test_a_failed_rollout_returns_to_what_the_draft_device_ran(boards: list[tuple[str, str]],
                                                               before: list[str | None]) -> None:
    found = releases_before(fleet(*boards)).values()
    assert [release and release.id for release in found] == before


@pytest.mark.parametrize(("boards", "ready", "before"), [
    ([("new", "old"), ("new", "old")], False, ["old", "old"]),  # waits for its first token, or died before
    ([("new", "old"), ("old", "new")], False, ["old", "old"]),  # a stage has returned by itself
    ([("new", "old"), ("new", "old")], True, ["new", "new"]),  # it has made one, and lost the note of it
    ([("new", ""), ("new", "")], False, ["new", "new"]),  # there is no other
    ([("old", "new"), ("new", "old")], False, ["old", "old"]),
])
def test_no_board_returns_to_a_release_that_never_worked(boards: list[tuple[str, str]], ready: bool,
                                                         before: list[str]) -> None:
    status = fleet(*boards, untried="new")
    status.boards[0] = replace(status.boards[0], ready=ready)
    assert [release and release.id for release in releases_before(status).values()] == before


def test_the_stages_switch_before_the_draft_device() -> None:
    found = interrupted(fleet(("new", "old"), ("old", "new"), ("new", "old"), ("", "")))
    assert found is not None
    assert {name: release and (release.id, release.stage) for name, release in found.items()} == {
        "board-0": ("old", 0), "board-1": ("old", 1), "board-2": ("old", 2)}
