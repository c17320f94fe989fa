"""Facts and actions over a real ssh; the boards' files are this machine's, but for /run and /var/lib."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kits import ssh_boards

from flowspec_edge.boards.deploy.actions import (
    Action,
    BoardState,
    Environment,
    RequiredPart,
    Step,
    ask_boards,
    run,
)
from flowspec_edge.boards.deploy.steps.phases import bring_about
from flowspec_edge.boards.inventory import DeviceEntry
from flowspec_edge.boards.probe.facts import BoardFacts, ReleaseFacts
from flowspec_edge.errors import FlowspecError

STATE = BoardState("any", release="never-there", files={"release.json": "{}\n"})


def other(device: DeviceEntry, **changes: object) -> DeviceEntry:
    return device.model_copy(update=changes)


@ssh_boards.needs_boards
def test_an_unreachable_board_holds_up_no_other(boards: ssh_boards.Boards) -> None:
    boards.disconnect()
    good, second, _ = boards.inventory.device
    devices = {
        "no-sshd": other(good, ssh_port=1), "board-0": good,
        "stranger": other(good, ssh_key=f"{boards.directory}/stranger"),
        "nowhere": other(good, address="nowhere.invalid"), "board-1": second}
    errors: list[tuple[str, str]] = []
    steps: list[Step] = []
    outcomes = {outcome.board: outcome for outcome in bring_about(
        boards.inventory, "release", [(other(device, name=name), STATE) for name, device in devices.items()],
        dry_run=True, on_step=steps.append, on_error=lambda *error: errors.append(error))}
    assert list(outcomes) == list(devices)
    for name in ("board-0", "board-1"):
        assert outcomes[name].error == ""
        assert outcomes[name].steps == [Step(name, "release", True)]
    assert not Path("/opt/flowspec/releases/never-there").exists()
    for name, words in (("stranger", "Permission denied"), ("no-sshd", "ssh: connect to host"),
                        ("nowhere", "nowhere.invalid is unknown here")):
        assert outcomes[name].error.startswith("connect: "), outcomes[name].error
        assert words in outcomes[name].error
        assert outcomes[name].steps == []
    assert dict(errors) == {name: outcome.error for name, outcome in outcomes.items() if outcome.error}
    assert sorted(step.board for step in steps) == ["board-0", "board-1"]


@ssh_boards.needs_boards
def test_an_unknown_host_key_is_not_accepted(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("UserKnownHostsFile /dev/null\nGlobalKnownHostsFile /dev/null\n"
                      "StrictHostKeyChecking yes\n")
    inventory = boards.with_cluster(ssh_config=str(config))
    [error] = ask_boards(inventory, [(inventory.device[0], STATE, None)])
    assert isinstance(error, FlowspecError)
    assert "Host key verification failed" in str(error)


@ssh_boards.needs_boards
def test_commands_stop_at_the_first_failure_which_is_one_line(boards: ssh_boards.Boards) -> None:
    device = boards.inventory.device[0]
    boards.inside(0, "rm", "-rf", "/run/try")
    actions = [Action("made", ("mkdir /run/try", "umask > /run/try/mask; cd /nowhere || true")),
               Action("sent", ("tar -xf - -C /run/try",), {"a/text": "hello\n", "b/file": Path(__file__)}),
               Action("nothing"),
               Action("fails", ("echo more >&2; echo no luck >&2; false", "touch /run/try/after")),
               Action("never", ("touch /run/try/after",))]
    [outcome] = run(boards.inventory, [(device, actions)])
    assert outcome.error == "fails: no luck"
    assert [(step.name, step.changed) for step in outcome.steps] == [
        ("made", True), ("sent", True), ("nothing", False)]
    there = boards.root(0) / "run/try"
    assert sorted(path.name for path in there.iterdir()) == ["a", "b", "mask"]
    assert ((there / "mask").read_text(), (there / "a/text").read_text()) == ("0022\n", "hello\n")
    assert (there / "b/file").read_bytes() == Path(__file__).read_bytes()
    assert (there / "b/file").stat().st_mode & 0o777 == 0o644


@ssh_boards.needs_boards
def test_a_board_that_hangs_ends_at_the_deadline(boards: ssh_boards.Boards) -> None:
    """Its shell is stopped; its sshd goes on answering."""
    hangs, goes_on, _ = boards.inventory.device
    hung, other = run(boards.inventory, [
        (hangs, [Action("hangs", ("kill -STOP $$",), timeout_s=2.0), Action("never", ("true",))]),
        (goes_on, [Action("goes on", ("true",))])])
    assert hung.error.startswith("hangs: sh did not finish within 2 s: ")
    assert (other.error, other.changes) == ("", 1)


@ssh_boards.needs_boards
def test_a_caller_who_stops_leaves_no_connection(boards: ssh_boards.Boards) -> None:
    """Ctrl-C, between two steps."""
    def interrupt(step: Step) -> None:
        raise KeyboardInterrupt

    actions = [Action("first", ("true",)), Action("second", ("touch /run/second",))]
    with pytest.raises(KeyboardInterrupt):
        run(boards.inventory, [(boards.inventory.device[place], actions) for place in (0, 1)],
            on_step=interrupt)
    for place in (0, 1):
        assert not (boards.root(place) / "run/second").exists()


@ssh_boards.needs_boards
def test_facts_of_a_board_with_something_on_it(boards: ssh_boards.Boards) -> None:
    """Read by programs of their own: sha256sum, stat, readlink."""
    home = "/var/lib/flowspec/models/abc"
    boards.inside(0, "sh", "-c", f"rm -rf /var/lib/flowspec; mkdir -p {home}/draft/target {home}/stage-1; "
                                 f"chmod 750 /var/lib/flowspec; echo some > {home}/manifest.json; "
                                 f"echo half > {home}/draft/config.json; "
                                 "mkdir -p /opt/flowspec/releases/r1; cd /opt/flowspec/releases/r1; "
                                 "echo {} > release.json; touch untried")

    def digest(path: str) -> str:
        command = ["sha256sum", str(boards.root(0) / path.lstrip("/"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]

    file = ("draft/config.json", 5, digest(f"{home}/draft/config.json"))
    state = BoardState("board-0", unit="flowspec-draft.service", environment=Environment("e" * 16, "", {}))
    part = RequiredPart("abc", (file,), digest(f"{home}/manifest.json"))
    bare = RequiredPart("other", (file,), "0" * 64)
    found, missing = ask_boards(boards.inventory, [(boards.inventory.device[0], state, part),
                                                   (boards.inventory.device[1], state, bare)])
    assert isinstance(found, BoardFacts)
    assert isinstance(missing, BoardFacts)
    assert found.modes["/var/lib/flowspec"] == "750 root"
    assert (found.modes["/etc/flowspec"], missing.modes["/var/lib/flowspec"]) == (None, None)
    assert found.releases == {"r1": ReleaseFacts({
        "release.json": digest("/opt/flowspec/releases/r1/release.json")})}
    assert list(found.parts) == ["abc/draft", "abc/stage-1"]
    assert "root" in found.groups
    assert (found.user, found.current, [*found.publics], found.client_key) == (None, "", [], False)
    assert abs(found.ahead) - found.within < 1.0
    # What was never verified counts as missing, though it is there.
    assert (found.missing_bytes, found.part_changes) == (5, True)
    assert (missing.missing_bytes, missing.part_changes) == (5, True)
