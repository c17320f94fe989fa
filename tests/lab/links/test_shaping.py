"""Boards over a real ssh: shaped, measured, and restored, whatever happens."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits import network_beds, ssh_boards

from flowspec_edge.boards.commands import LocalRunner, SshRunner, protected_ports, runner_for
from flowspec_edge.boards.inventory import DeviceEntry
from flowspec_edge.boards.links.between import measure_between
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.lab.links.shaping import STATE, DeviceShaping, RemoteShaping

pytestmark = ssh_boards.needs_boards
SLEEPER = "sh -c echo"  # the command line of a timer without systemd
PATIENCE_S = 60.0  # only a failing test waits so long


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_boards.Boards]:
    with ssh_boards.boards(1, tmp_path_factory.mktemp("boards")) as boards, boards.bed.entered(boards.outside):
        yield boards


def runner(boards: ssh_boards.Boards, place: int = 1) -> SshRunner:
    return SshRunner(boards.inventory, boards.inventory.device[place])


def shaping_of(boards: ssh_boards.Boards, after_s: int = 60) -> DeviceShaping:
    return DeviceShaping(runner(boards), "eth0", protected_ports(boards.inventory), after_s)


def test_shaped_measured_and_restored(boards: ssh_boards.Boards) -> None:
    before = [boards.shown(place) for place in (0, 1)]
    with RemoteShaping(boards.inventory) as links:
        assert [boards.shown(place) for place in (0, 1)] == before  # armed, and nothing more
        assert all(len(boards.running(place, SLEEPER)) == 1 for place in (0, 1))
        links.apply(200)
        links.apply(100)
        assert all("htb f5ec:" in boards.shown(place) for place in (0, 1))
        payload = pytest.approx(100 * 1448 / 1514, rel=0.1)
        # A busy processor slows a link down, or reads the first message late, which makes it look faster.
        for _ in range(8):
            rates = links.measure(0.4)
            if all(rate.measure is None or rate.measure.mbps == payload for rate in rates):
                break
        assert [(rate.source, rate.target, rate.error) for rate in rates] == [
            ("board-0", "board-1", ""), ("board-1", "board-0", "")]
        for rate in rates:
            assert rate.measure is not None
            assert rate.measure.mbps == payload
        links.apply(None)
        assert [boards.shown(place) for place in (0, 1)] == before
        links.apply(50)
        assert all(boards.left(place, SLEEPER, newest=1) == 1 for place in (0, 1))  # renewed, not piled up
    assert [boards.shown(place) for place in (0, 1)] == before
    for place in (0, 1):
        assert boards.left(place, SLEEPER) == boards.left(place, "sleep") == 0
        assert runner(boards, place).run(["ls", STATE]) == ""
    links.restore()


_CONTROLLER = """
import sys
from pathlib import Path
from flowspec_edge.boards.inventory import load_inventory
from flowspec_edge.lab.links.shaping import RemoteShaping
with RemoteShaping(load_inventory(Path(sys.argv[1])), restore_after_s=20) as links:
    links.apply(100)
    print("shaped", flush=True)
    sys.stdin.read()
"""


def test_boards_restore_themselves_without_the_controller(boards: ssh_boards.Boards) -> None:
    before = [boards.shown(place) for place in (0, 1)]
    with subprocess.Popen([sys.executable, "-c", _CONTROLLER, str(boards.file)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "shaped\n"
        assert all(boards.left(place, SLEEPER, newest=1) == 1 for place in (0, 1))
        dead_men = [pid for place in (0, 1) for pid in boards.running(place, SLEEPER)]
        assert len(dead_men) == 2
        controller.send_signal(signal.SIGKILL)
    assert all(network_beds.ended(pid, PATIENCE_S) for pid in dead_men)
    assert [boards.shown(place) for place in (0, 1)] == before
    assert runner(boards).run(["ls", STATE]) == ""


def test_a_late_controller_gets_an_error(boards: ssh_boards.Boards) -> None:
    before = boards.shown(1)
    with shaping_of(boards, after_s=20) as link:
        link.apply(100)
        assert all(network_beds.ended(pid, PATIENCE_S) for pid in boards.running(1, SLEEPER))
        assert boards.shown(1) == before
        with pytest.raises(FlowspecError, match=r"board-1 \(10\.77\.0\.2\): .* was not renewed for 20 s"):
            link.apply(50)
    assert boards.shown(1) == before


def test_a_late_controller_leaves_the_next_run_alone(boards: ssh_boards.Boards) -> None:
    before = boards.shown(1)
    late = shaping_of(boards, after_s=2)
    late.start()
    assert all(network_beds.ended(pid, PATIENCE_S) for pid in boards.running(1, SLEEPER))
    with shaping_of(boards) as link:
        link.apply(100)
        with pytest.raises(FlowspecError, match="was not renewed for 2 s"):
            late.apply(50)
        late.restore()
        assert len(boards.running(1, SLEEPER)) == 1
        assert "htb f5ec:" in boards.shown(1)
        link.apply(200)
    assert boards.shown(1) == before


def test_a_timer_leaves_the_next_run_alone(boards: ssh_boards.Boards) -> None:
    """One whose run's link was restored by hand, as the error for a second run says."""
    before = boards.shown(1)
    late = shaping_of(boards, after_s=5)
    late.start()
    [timer] = boards.running(1, SLEEPER)
    runner(boards).run(["sh", f"{STATE}/eth0/restore"])
    with shaping_of(boards) as link:
        link.apply(100)
        assert network_beds.ended(timer, PATIENCE_S)
        assert "htb f5ec:" in boards.shown(1)
        link.apply(200)
    assert boards.shown(1) == before


def test_a_second_run_is_refused(boards: ssh_boards.Boards) -> None:
    with shaping_of(boards) as link:
        with pytest.raises(FlowspecError, match="another run shapes eth0"):
            shaping_of(boards).start()
        link.apply(100)
        with pytest.raises(UsageError, match="shaped already: another run"):
            shaping_of(boards).start()
        link.renew()  # and the first one goes on
    with pytest.raises(FlowspecError, match="has not begun, or is over"):
        link.apply(10)


def test_a_board_that_fails_undoes_those_before_it(boards: ssh_boards.Boards) -> None:
    boards.tc(1, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "tbf", "rate", "1gbit",
              "burst", "64kb", "limit", "1mb")
    try:
        before = [boards.shown(place) for place in (0, 1)]
        with pytest.raises(UsageError, match=r"board-1 .* \(tbf 1:\) that could not be restored"):
            RemoteShaping(boards.inventory).start()
        assert [boards.shown(place) for place in (0, 1)] == before
        assert boards.left(0, SLEEPER) == 0
    finally:
        boards.tc(1, "qdisc", "del", "dev", "eth0", "root")


@pytest.mark.parametrize(("options", "plain"), [([], True), (["limit", "77"], False)])
def test_an_explicit_qdisc_comes_back_or_is_refused(boards: ssh_boards.Boards, options: list[str],
                                                    plain: bool) -> None:
    boards.tc(1, "qdisc", "add", "dev", "eth0", "root", "handle", "8001:", "pfifo", *options)
    try:
        before = boards.shown(1)
        assert "pfifo 8001:" in before
        if plain:
            with shaping_of(boards) as link:
                link.apply(100)
                assert "pfifo 8001:" not in boards.shown(1)
        else:
            with pytest.raises(UsageError, match=r"pfifo 8001:\) that could not be restored"):
                shaping_of(boards).start()
        assert boards.shown(1) == before
    finally:
        boards.tc(1, "qdisc", "del", "dev", "eth0", "root")


def test_an_interface_that_is_not_there(boards: ssh_boards.Boards) -> None:
    with pytest.raises(FlowspecError, match=r"board-1 \(10\.77\.0\.2\): Cannot find device .wlan7"):
        DeviceShaping(runner(boards), "wlan7", []).start()
    assert runner(boards).run(["sh", "-c", f"ls {STATE} 2>/dev/null || :"]) == ""


def test_an_ordinary_user_needs_sudo(boards: ssh_boards.Boards) -> None:
    nobody = LocalRunner("here", ["setpriv", "--reuid", "65534", "--clear-groups", "--"])
    with pytest.raises(UsageError, match=r"here: .*sudo.*shaping needs root"):
        DeviceShaping(nobody, "eth0", []).start()


def entry(boards: ssh_boards.Boards, **changes: object) -> DeviceEntry:
    return boards.inventory.device[1].model_copy(update=changes)


def test_commands_over_ssh(boards: ssh_boards.Boards) -> None:
    argv = ["sh", "-c", "cat; echo \"$0\" '$1'", "a  b; *"]
    assert runner(boards).run(argv, stdin="in\n") == "in\na  b; * $1\n"
    with pytest.raises(FlowspecError, match=re.escape("board-1 (10.77.0.2): ls: cannot access '/nowhere'")):
        runner(boards).run(["ls", "/nowhere"])


@pytest.mark.parametrize(("changes", "cause"), [
    ({"ssh_port": 23}, "ssh: connect to host .* Connection refused"),
    ({"ssh_user": "nobody-there"}, "ssh: .*Permission denied"),
    ({"ssh_key": "stranger"}, "ssh: .*Permission denied"),
    ({"address": "10.77.0.77"}, "ssh: connect to host .* (No route|timed out)"),
    ({"address": "no-such-host.invalid"}, "ssh: Could not resolve"),
])
def test_ssh_failures_are_one_line(boards: ssh_boards.Boards, changes: dict[str, object],
                                        cause: str) -> None:
    if "ssh_key" in changes:
        changes = {"ssh_key": str(boards.directory / "stranger")}
    device = entry(boards, **changes)
    with pytest.raises(FlowspecError, match=cause) as raised:
        SshRunner(boards.inventory, device, own_connection=True).run(["true"])
    assert str(raised.value).startswith(f"board-1 ({device.address}): ssh: ")
    assert "\n" not in str(raised.value)


def test_an_unknown_host_key_is_refused(boards: ssh_boards.Boards, tmp_path: Path) -> None:
    config = boards.directory / "config"
    other = tmp_path / "config"
    other.write_text(config.read_text().replace(f"{boards.directory}/known", "/dev/null"))
    cluster = boards.inventory.cluster.model_copy(update={"ssh_config": str(other)})
    inventory = boards.inventory.model_copy(update={"cluster": cluster})
    with pytest.raises(FlowspecError, match=r"ssh: Host key verification failed"):
        SshRunner(inventory, boards.inventory.device[1], own_connection=True).run(["true"])


def test_a_failed_measurement_is_reported(boards: ssh_boards.Boards) -> None:
    source, target = boards.inventory.device
    target = target.model_copy(update={"python": "/nowhere/python"})
    rate = measure_between(boards.inventory, source, target, 0.1)
    assert rate.measure is None
    assert rate.error.startswith("board-1 (10.77.0.2): ")
    assert "/nowhere/python" in rate.error


def test_this_machine_is_not_asked_over_ssh(boards: ssh_boards.Boards) -> None:
    assert isinstance(runner_for(boards.inventory, boards.inventory.draft), SshRunner)
    with boards.bed.entered(0):
        assert isinstance(runner_for(boards.inventory, boards.inventory.draft), LocalRunner)
