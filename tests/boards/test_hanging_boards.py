"""Boards that accept ssh and hang, and ssh configurations of the user's own, over a real sshd."""

from __future__ import annotations

import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kits import ssh_boards
from kits.process_clusters import until

from flowspec_edge.boards import commands
from flowspec_edge.boards.commands import SshRunner, is_here, waited_for
from flowspec_edge.boards.inventory import DeviceEntry, Unreached, load_inventory
from flowspec_edge.boards.ssh_stages import SshBoards
from flowspec_edge.cli.common import progress
from flowspec_edge.cli.common.progress import long_waits
from flowspec_edge.cli.main import main

pytestmark = ssh_boards.needs_boards
PATIENCE_S = 60.0  # only a failing test waits so long
BEGAN_NOTHING = "ssh reaches it, and no command began within"


def runner(boards: ssh_boards.Boards, place: int = 1, timeout_s: float = PATIENCE_S) -> SshRunner:
    return SshRunner(boards.inventory, boards.inventory.device[place], timeout_s, own_connection=True)


def test_one_board_that_hangs_at_login_is_named_and_the_others_are_shown(
        boards: ssh_boards.Boards, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_LOGIN_S", 5.0)
    hosts, out = [boards.bed.address(place) for place in (0, 1)], tmp_path / "cluster.toml"
    config = tmp_path / "config"
    config.write_text((boards.directory / "config").read_text().replace("ControlMaster auto", ""))
    with boards.shell(1, "exec sleep 1000"):
        assert main(["deploy", "init", *hosts, "--user", "root", "--key", f"{boards.directory}/user",
                     "--ssh-config", str(config), "--out", str(out)]) == 1
    shown, said = capsys.readouterr()
    assert shown.startswith(f"{socket.gethostname()}: ")
    assert shown.count("; torch ") + shown.count("; no torch ") == 1
    (line,) = [line for line in said.splitlines() if line.startswith("flowspec: error: ")]
    assert f"{hosts[1]}: ssh: {BEGAN_NOTHING} 15 s; see what stops its login, such as" in line
    assert line.endswith(f"; {out} is not written")
    assert not out.exists()


def test_what_a_start_up_file_prints_is_no_output(boards: ssh_boards.Boards) -> None:
    with boards.shell(1, 'echo "{welcome}"; printf "no newline"; exec /bin/sh "$@"'):
        assert runner(boards).run(["cat"], stdin="given\n") == "given\n"


def test_a_board_that_reads_late_gets_all_of_a_large_input(boards: ssh_boards.Boards) -> None:
    """It begins to read after the first look at how long it takes, and the pipe holds 64 kB."""
    assert runner(boards).run(["sh", "-c", "sleep 1; wc -c"], stdin="x" * 3_000_000) == "3000000\n"


def test_a_start_up_file_that_asks_gets_no_input(boards: ssh_boards.Boards) -> None:
    asks = runner(boards)
    asks.login_s = 3.0
    script = 'echo "noetic or humble?"; read answer; exec /bin/sh "$@"'
    with boards.shell(1, script), pytest.raises(Unreached) as raised:
        asks.run(["cat"], stdin="given\n")
    assert f"{BEGAN_NOTHING} 3 s; it printed 'noetic or humble?' last: see what" in str(raised.value)


def test_a_command_that_hangs_is_reported_with_what_it_did_last(boards: ssh_boards.Boards) -> None:
    hangs = runner(boards, timeout_s=PATIENCE_S)
    with pytest.raises(Unreached) as raised:
        hangs.run(["sh", "-c", r"printf '\0361 import torch\n' >&2; exec sleep 1000"])
    assert str(raised.value).startswith("board-1 (10.77.0.2): sh did not finish within 1 s; the last that it "
                                        "did was: import torch: see whether the board hangs")


def test_a_board_that_stops_in_a_command(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    """The sshd of the connection is stopped; keep-alives are as often as the user's configuration says."""
    config = tmp_path / "config"
    config.write_text((boards.directory / "config").read_text()
                      + "ServerAliveInterval 1\nServerAliveCountMax 1\n")
    inventory = boards.with_cluster(ssh_config=str(config))
    stops = SshRunner(inventory, inventory.device[1], PATIENCE_S, own_connection=True)
    with pytest.raises(Unreached, match=r"^board-1 \(10\.77\.0\.2\): ssh: the connection broke in sh: see"):
        stops.run(["sh", "-c", "kill -STOP $PPID; exec sleep 1000"])
    for pid in boards.running(1, "sleep 1000"):
        subprocess.run(["kill", "-KILL", str(pid)], check=True)


def test_stages_on_a_board_that_hangs_say_so(boards: ssh_boards.Boards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_LOGIN_S", -9.0)
    with boards.bed.entered(0):  # as on the draft device
        stages = SshBoards(boards.inventory, "/model")
    with boards.shell(1, "exec sleep 1000"):
        try:
            watch = stages.connect().watch
            client = stages._stages[0].client
            with pytest.raises(subprocess.TimeoutExpired):
                client.wait(2.0)  # the limit is 1 s
            cause = watch()
        finally:
            stages.disconnect()
    assert cause is not None
    assert cause.startswith(f"board-1 (10.77.0.2): {BEGAN_NOTHING} 1 s: ")


def test_the_users_ssh_configuration_decides_what_the_cluster_file_leaves_out(
        boards: ssh_boards.Boards, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Port, user and key of this machine's own address, with a command and a forwarding for terminals."""
    address = boards.bed.address(boards.outside)
    with boards.sshd(boards.outside, 2222):
        known, public = tmp_path / "known", (boards.directory / "host.pub").read_text()
        known.write_text(f"[{address}]:2222 {public}{boards.bed.address(1)} {public}")
        config = tmp_path / "config"
        config.write_text(
            f"Host {address}\n Port 2222\nHost *\n User root\n IdentityFile {boards.directory}/user\n"
            f" UserKnownHostsFile {known}\n ConnectTimeout 7\n RemoteCommand tmux attach\n RequestTTY yes\n"
            f" LocalForward 22 {address}:22\n ExitOnForwardFailure yes\n")
        bare = DeviceEntry(name="board", address=address, role="verify")
        inventory = boards.with_cluster(ssh_config=str(config))
        assert not is_here(inventory, bare)
        asked = SshRunner(inventory, bare)
        assert asked.run(["sh", "-c", "echo $SSH_CONNECTION"]).split()[2:] == [address, "2222"]
        assert asked.login_s == 7 + commands._LOGIN_S
        out = tmp_path / "cluster.toml"
        assert main(["deploy", "init", address, boards.bed.address(1), "--ssh-config", str(config),
                     "--out", str(out)]) == 0
    capsys.readouterr()
    assert [(d.ssh_port, d.ssh_user, d.ssh_key) for d in load_inventory(out).device] == [(None, "", "")] * 2


def test_the_boards_that_are_waited_for(boards: ssh_boards.Boards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LONG_S", 0.0)
    boards.inside(1, "mkfifo", "/run/fifo")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(runner(boards).run, ["cat", "/run/fifo"])
        until(lambda: bool(waited_for()))
        assert long_waits().startswith("waiting for board-1 (10.77.0.2), 0 s")
        (boards.root(1) / "run/fifo").write_text("done")
        assert answer.result(PATIENCE_S) == "done"
    assert waited_for() == []
    assert long_waits() == ""
