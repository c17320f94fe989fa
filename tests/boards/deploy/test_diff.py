"""What a deployment changes follows from the boards' facts alone: nothing where all is as it should be, and
for each fact that is not, the steps that mend it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.settled_boards import ENVIRONMENT, KEYS, MODES, REQUEST, STAGE_UNIT, changed, diff, settled, status

from flowspec_edge.boards.deploy.diff import Diff
from flowspec_edge.boards.probe.facts import BoardFacts, BoardStatus, Installed, ReleaseFacts, ServiceFacts
from flowspec_edge.boards.services.status import FleetStatus

OTHER = "o" * 40
SETTLED = settled()
STAGE = SETTLED["stage"]


def test_nothing_changes_where_all_is_as_it_should_be() -> None:
    found = diff(SETTLED)
    assert (changed(found, "draft"), changed(found), found.problems) == ([], [], ())


def test_a_bare_board_gets_everything_with_any_key() -> None:
    bare = BoardFacts(power_modes=MODES, part_changes=True)
    found = diff({"draft": bare, "stage": bare}, recorded={})
    assert found.release is None
    assert changed(found) == [
        "user flowspec", *(f"directory {path}" for path in (
            "/opt/flowspec", "/opt/flowspec/releases", "/opt/flowspec/venvs", "/opt/flowspec/wheels",
            "/var/lib/flowspec", "/var/lib/flowspec/models", "/etc/flowspec")),
        "wheels (2 of 2)", "environment", "power mode", "key", "shards", "release", "units",
        "current release", "power mode at boot", "enabled at boot", "running"]
    assert "clients' key" in changed(found, "draft")
    known = diff({name: replace(bare, publics=(key,)) for name, key in KEYS.items()})
    assert known.release == diff(SETTLED).release
    assert [name for name in changed(found) if name != "key"] == changed(known)


def stage(**changes: object) -> Callable[[BoardFacts], BoardFacts]:
    return lambda facts: replace(facts, **changes)  # type: ignore[arg-type]


def service(**changes: object) -> Callable[[BoardFacts], BoardFacts]:
    return lambda facts: replace(facts, services={
        **facts.services, STAGE_UNIT: replace(facts.services[STAGE_UNIT], **changes)})  # type: ignore[arg-type]


CASES: dict[str, tuple[Callable[[BoardFacts], BoardFacts], set[str]]] = {
    "the clock is behind": (stage(ntp="no", ahead=-90.4), {"clock set: it was 90 s behind"}),
    "a group was added to the system": (
        lambda facts: replace(facts, user={**(facts.user or {}), "groups": ["video"]}), {"user flowspec"}),
    "a directory is too open": (
        lambda facts: replace(facts, modes={**facts.modes, "/etc/flowspec": "755 root"}),
        {"directory /etc/flowspec"}),
    "the environment was cut off, and one wheel is there": (
        lambda facts: replace(facts, venvs={**facts.venvs, ENVIRONMENT.digest: False},
                              wheels={"flowspec.whl": "2" * 64, "old.whl": "3" * 64}),
        {"wheels (1 of 2)", "environment"}),
    "another power mode": (stage(power_number="0"), {"power mode"}),
    "a file of the part is missing": (stage(part_changes=True), {"shards"}),
    "a unit was edited": (
        lambda facts: replace(facts, units={**facts.units, "flowspec-verify@.service": "x"}),
        {"units", "running"}),
    "the unit does not start at boot": (service(enabled=False), {"enabled at boot"}),
    "the service has failed": (service(active=False), {"running"}),
    "the service runs another release": (service(release="/opt/flowspec/releases/r1"), {"running"}),
    "the power unit has failed": (stage(power_unit_runs=False), {"power mode at boot"}),
    "a unit of another role": (
        lambda facts: replace(facts, services={**facts.services,
                                               "flowspec-verify@7.service": ServiceFacts()}),
        {"units of another role"}),
    "the rollout did not end": (
        lambda facts: replace(facts, modes={**facts.modes, "/opt/flowspec/unsettled": "644 root"}),
        {"settled"}),
    "a part that no release needs": (
        lambda facts: replace(facts, parts=(*facts.parts, f"{'b' * 16}/stage-1")), {"old shards"}),
    "a piece of the part's first file came": (
        lambda facts: replace(facts, part_changes=True, parts=(REQUEST[:16], *facts.parts[1:])), {"shards"}),
    "an environment that no release needs": (
        lambda facts: replace(facts, venvs={**facts.venvs, "unused": True}), {"old releases"}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_fact_that_is_not_as_it_should_be(case: tuple[Callable[[BoardFacts], BoardFacts], set[str]]
                                               ) -> None:
    change, steps = case
    found = diff({**SETTLED, "stage": change(STAGE)})
    assert set(changed(found)) == steps
    assert changed(found, "draft") == []


@examples(60, quick=24)
@given(st.sets(st.sampled_from(sorted(CASES))))
def test_steps_of_several_facts_are_those_of_each(names: set[str]) -> None:
    facts, steps = STAGE, set[str]()
    for name in sorted(names):
        change, own = CASES[name]
        facts, steps = change(facts), steps | own
    assert set(changed(diff({**SETTLED, "stage": facts}))) == steps


def test_another_release_is_current() -> None:
    other = "/opt/flowspec/releases/r1"
    facts = service(release=other)(replace(STAGE, current=other, releases={
        **STAGE.releases, "r1": ReleaseFacts({}), "r0.partial": ReleaseFacts({})}))
    assert changed(diff({**SETTLED, "stage": facts})) == [
        "current release", "power mode at boot", "running", "old releases", "settled"]


def test_up_again_changes_nothing_after_three_models() -> None:
    """The shards of the release before the previous one go at the rollout's end, not with the next command;
    and not before it, because boards that go back would lack them."""
    parts = tuple(f"{model * 16}/stage-1" for model in "abc")
    release = diff(SETTLED).release
    assert release is not None
    now, before = (Installed(name, "verify", 1, model * 64) for name, model in (("r2", "b"), ("r1", "c")))
    ahead, after = ({**SETTLED, "stage": replace(STAGE, parts=parts)}, FleetStatus([
        BoardStatus("draft", replace(now, role="draft", stage=0)), BoardStatus("stage", now, before)]))
    found = diff(ahead, before=after).boards[1]
    assert not any(action.changes for action in (*found.switch, *found.activate))
    [shards] = [action for action in found.settle if action.changes]
    assert shards.step == "old shards"
    assert [part for part in parts if part.partition("/")[0] in " ".join(shards.commands)] == [parts[2]]
    running = FleetStatus([BoardStatus("draft", Installed(release, "draft", 0, REQUEST)),
                           BoardStatus("stage", Installed(release, "verify", 1, REQUEST), now)])
    again = {**SETTLED, "stage": replace(STAGE, parts=parts[:2])}
    assert changed(diff(again, before=running)) == []


def test_an_interrupted_rollout_keeps_the_way_back(tmp_path: Path) -> None:
    """The draft device runs r1, the stage has been switched to r2, and now another release is deployed."""
    boards = [BoardStatus("draft", Installed("r1", "draft", 0)),
              BoardStatus("stage", Installed("r2", "verify", 1), Installed("r1", "verify", 1))]
    releases = {**STAGE.releases, **{name: ReleaseFacts({}) for name in ("r5", "r4", "r3", "r2", "r1")}}
    facts = replace(STAGE, current="/opt/flowspec/releases/r2", previous="/opt/flowspec/releases/r1",
                    releases=releases)
    found = diff({**SETTLED, "stage": facts}, before=FleetStatus(boards))
    for name in releases:
        (tmp_path / "releases" / name).mkdir(parents=True)
    for name, release in (("current", "r2"), ("previous", "r1")):
        (tmp_path / name).symlink_to(tmp_path / "releases" / release)
    stage = found.boards[1]
    for action in (*stage.switch, *stage.settle):
        if action.step in ("current release", "old releases"):
            here = "\n".join(action.commands).replace("/opt/flowspec", str(tmp_path))
            subprocess.run(["sh", "-ec", here], check=True)
    assert found.release is not None
    assert {name: Path(os.readlink(tmp_path / name)).name for name in ("current", "previous")} == {
        "current": found.release, "previous": "r1"}
    assert (tmp_path / "previous").is_dir()
    assert not (tmp_path / "releases/r2").exists()  # as three others are newer


def test_the_draft_device_restarts_once_it_has_switched() -> None:
    """And waited for at the end; until then it may return to the release before by itself."""
    other = "/opt/flowspec/releases/r1"
    unit = "flowspec-draft.service"
    facts = replace(SETTLED["draft"], current=other, services={
        unit: replace(SETTLED["draft"].services[unit], release=other)})
    draft = diff({**SETTLED, "draft": facts}).boards[0]
    assert [action.step for action in draft.switch if action.changes] == ["current release", "restarting"]
    assert [action.step for action in draft.activate if action.changes] == ["running"]
    assert [action.step for action in draft.settle if action.changes] == ["settled"]
    [switched] = [action for action in draft.switch if action.step == "current release"]
    assert any("/opt/flowspec/unsettled" in command for command in switched.commands)


@pytest.mark.parametrize(("there", "untried"), [
    ("", True), ("untried", True),
    ("release.json", False),  # it runs, and a damaged file is replaced
])
def test_the_draft_devices_release_is_untried_until_a_token_comes(tmp_path: Path, there: str, untried: bool
                                                                  ) -> None:
    """``there``: a file of the release that is there."""
    found = diff({name: BoardFacts(publics=(key,)) for name, key in KEYS.items()})
    draft, stage = ([command for action in board.release for command in action.commands]
                    for board in found.boards)
    assert not any("untried" in command for command in stage)
    [command] = [command for command in draft if "untried" in command]
    home = tmp_path / "releases" / (found.release or "")
    home.with_suffix(".partial").mkdir(parents=True)
    if there:
        home.mkdir()
        (home / there).touch()
    subprocess.run(["sh", "-ec", command.replace("/opt/flowspec", str(tmp_path))], check=True)
    assert home.with_suffix(".partial").joinpath("untried").exists() == untried


def test_a_pair_that_the_running_release_needs_stays() -> None:
    """The records, of another machine, say the former one: a line says so, and no board is touched."""
    rotated = replace(STAGE, publics=(KEYS["stage"], OTHER))
    before = status()
    before.boards[1] = replace(before.boards[1], current=Installed("r2", "verify", 1, REQUEST, "", OTHER))
    found = diff({**SETTLED, "stage": rotated}, before=before)
    assert [board.key for board in found.boards] == ["show", "show"]
    [problem] = found.problems
    assert problem.startswith("stage: its key has changed: it has oooooooooo…, and /lab/keys/stage.pub says")


def test_a_second_pair_and_a_changed_key() -> None:
    second = replace(STAGE, publics=(KEYS["stage"], OTHER))
    found = diff({**SETTLED, "stage": second})  # a rotation that was given up
    assert (changed(found), found.problems, found.release) == (["unused keys"], (), diff(SETTLED).release)
    left = replace(STAGE, modes={**STAGE.modes, "/etc/flowspec/board.key.old": "400 root"})
    assert changed(diff({**SETTLED, "stage": left})) == ["unused keys"]
    [problem] = diff({**SETTLED, "stage": replace(STAGE, publics=(OTHER,))}).problems
    assert problem.startswith("stage: its key has changed: it has oooooooooo…, and /lab/keys/stage.pub says")
    not_recorded = diff(SETTLED, recorded={"draft": KEYS["draft"]})
    assert (changed(not_recorded), not_recorded.problems) == ([], ())


NEW = {"draft": "D" * 40, "stage": "S" * 40}


@dataclass
class Rotated:
    """The boards and records while keys are rotated; ``running``: the keys that the running release needs."""

    held: dict[str, list[str]] = field(default_factory=lambda: {name: [key] for name, key in KEYS.items()})
    recorded: dict[str, str] = field(default_factory=lambda: {**KEYS})
    running: dict[str, str] = field(default_factory=lambda: {**KEYS})
    came: int = 0  # steps carried out

    def diff(self, rotate: bool = False) -> Diff:
        before = FleetStatus([BoardStatus(name, Installed("r2", "verify", place, REQUEST, "", key))
                              for place, (name, key) in enumerate(self.running.items())])
        facts = {name: replace(SETTLED[name], publics=tuple(held)) for name, held in self.held.items()}
        return diff(facts, recorded=self.recorded, before=before, rotate=rotate)

    def rotate(self, steps: int, order: Sequence[str], gives_up: bool = False) -> None:
        """Carry out at most so many steps, on the boards in that order, as ``Rollout.up`` does."""
        end = self.came + steps
        actions = {board.device.name: board.key for board in self.diff(rotate=not gives_up).boards}
        for name in order:
            if actions[name] == "add" and self.came < end and len(self.held[name]) == 1:
                self.held[name].append(NEW[name] if NEW[name] not in self.held[name] else "x" * 40)
                self.came += 1
        if self.came < end and not gives_up:
            for name in order:
                if self.recorded[name] != self.held[name][-1] and self.came < end:
                    self.recorded[name] = self.held[name][-1]
                    self.came += 1
        if self.came < end:
            found = self.diff()
            assert not found.problems
            if self.running != (needed := {b.device.name: b.state.public for b in found.boards}):
                self.running = needed
                self.came += 1
            for name in order:
                if len(self.held[name]) > 1 and self.came < end:
                    self.held[name] = [needed[name]]
                    self.came += 1


@pytest.mark.parametrize("then", ["rotate", "up"])
@pytest.mark.parametrize("order", [("draft", "stage"), ("stage", "draft")])
@pytest.mark.parametrize("steps", range(7))
def test_a_rotation_that_is_interrupted_goes_on(steps: int, order: Sequence[str], then: str) -> None:
    """A board always has the pair that its release needs; the same command needs no step twice."""
    boards = Rotated()
    boards.rotate(steps, order)
    assert boards.came == steps
    assert all(boards.running[name] in boards.held[name] for name in KEYS)
    boards.rotate(99, order[::-1], gives_up=then == "up")
    assert {name: [key] for name, key in boards.recorded.items()} == boards.held
    assert boards.running == boards.recorded
    if then == "rotate":
        assert (boards.running, boards.came) == (NEW, 7)
    elif steps not in (3,):  # between the records, `up` keeps those that are there
        assert boards.running == (KEYS if steps < 3 else NEW)


@pytest.mark.parametrize(("modes", "says"), [
    ("", "MAXN is wanted, and this machine has none: there is no /etc/nvpmodel.conf"),
    (MODES.replace("MAXN", "30W"), "/etc/nvpmodel.conf knows no MAXN, but 15W, 30W")])
def test_a_power_mode_that_a_board_does_not_have_is_known_before(modes: str, says: str) -> None:
    found = diff({**SETTLED, "stage": replace(STAGE, power_modes=modes)})
    assert found.problems == (f"stage: power mode: {says}",)
