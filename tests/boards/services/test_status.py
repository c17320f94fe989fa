"""What boards say of themselves, put together; and boards that say nothing that makes sense."""

from __future__ import annotations

import http.server
import json
import re
import threading
from pathlib import Path

import pytest
from kits import rail_files

from flowspec_edge.boards.inventory import load_inventory
from flowspec_edge.boards.probe.facts import BoardStatus, Installed, parse
from flowspec_edge.boards.probe.onboard.service import ask_ready, read_release
from flowspec_edge.boards.services.client import DraftClient
from flowspec_edge.boards.services.status import FleetStatus
from flowspec_edge.cli.main import main
from flowspec_edge.errors import FlowspecError

WHOLE = {"id": "a1", "role": "verify", "stage": 2, "model": "m"}


def board(place: int, release: str | None = "a1", state: str = "active", **more: object) -> BoardStatus:
    """D0 at 0, Vi at i."""
    role = "verify" if place else "draft"
    ready = {} if place or release is None else {"ready": True}
    return BoardStatus(f"board-{place}", None if release is None else Installed(release, role, place), **{  # type: ignore[arg-type]
        "state": "absent" if release is None else state, **ready, **more})


@pytest.mark.parametrize(("boards", "release", "ready", "ok", "reason"), [
    ([board(0), board(1), board(2)], "a1", True, True, ""),
    ([board(0), board(1), board(2, None)], "a1", True, True, ""),  # the cluster leaves it out
    ([board(0), board(1), board(2, None, error="board-2: silent")], "a1", True, False, ""),
    ([board(0), board(1, state="failed")], "a1", True, False, ""),
    ([board(0, ready=False, reason="V1 is lost"), board(1)], "a1", False, False, "V1 is lost"),
    ([board(0), board(1, "b2")], None, True, False, "different releases"),
    ([board(0, ready=False, reason="V1 is lost"), board(1, "b2")], None, False, False,
     "different releases: flowspec deploy up brings all to one; V1 is lost"),
    ([board(0, None), board(1, None)], None, False, False, "nothing is deployed: flowspec deploy up"),
    ([board(0, None, error="board-0: silent"), board(1, None)], None, False, False, ""),
])
def test_a_cluster_is_well_if_all_of_it_is(boards: list[BoardStatus], release: str | None, ready: bool,
                                           ok: bool, reason: str) -> None:
    status = FleetStatus(boards)
    assert (status.release, status.ready, status.ok) == (release, ready, ok)
    assert reason in status.reason
    assert bool(reason) == bool(status.reason)
    assert not ready or bool(status.disorder) != ok
    told = json.loads(json.dumps(status.as_json()))
    assert (told["ok"], told["release"], len(told["boards"])) == (ok, release, len(boards))


@pytest.mark.parametrize("text", [None, "", "[]", "{}", json.dumps({**WHOLE, "role": "cook"}),
                                  json.dumps({**WHOLE, "stage": "2"}), json.dumps(WHOLE)[:-9]])
def test_a_release_that_is_not_whole_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "release.json").write_text(text)
    assert read_release(str(tmp_path)) is None
    (tmp_path / "release.json").write_text(json.dumps(WHOLE))
    assert read_release(str(tmp_path)) == {**WHOLE, "tried": True}
    (tmp_path / "untried").touch()
    assert read_release(str(tmp_path)) == {**WHOLE, "tried": False}
    told = parse({"time": 0, "seconds": 0, "service": {"current": WHOLE}}, 0.0, 0.0).running.current
    assert told == Installed("a1", "verify", 2, "m")
    assert told.unit == "flowspec-verify@2.service"


def test_another_program_on_the_port_is_no_draft_service(tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a board's own is for the world outside
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ready").write_text("[]")
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/models").write_text("[]")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever).start()
        port = server.server_address[1]
        inventory = load_inventory(write(tmp_path, f"serve_port = {port}"))
        with pytest.raises(FlowspecError, match=rf"on board-0, port {port}, is no draft service"), \
                DraftClient(inventory, inventory.draft) as service:
            service.model()
        for _ in range(2):  # with the file, then with a page about its absence
            assert ask_ready("127.0.0.1", port, "none") == {
                "ready": False, "reason": f"what answers on port {port} is no draft service"}
            (tmp_path / "ready").unlink(missing_ok=True)
        server.shutdown()
    assert ask_ready("127.0.0.1", port, "none")["reason"].startswith(f"no answer on port {port}: ")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def junk(tmp_path: Path) -> str:
    """A cluster on this machine, whose Python prints nonsense."""
    return str(write(tmp_path, 'board_python = "/bin/echo"'))


def write(directory: Path, setting: str) -> Path:
    """The file of a cluster that is all on this machine."""
    file = directory / "cluster.toml"
    file.write_text(f'[cluster]\nname = "here"\nmodel = "demo"\n{setting}\n'
                    + "".join(f'[[device]]\nname = "board-{place}"\naddress = "127.0.0.{place + 1}"\n'
                              f'role = "{"verify" if place else "draft"}"\n' for place in range(2)))
    return file


@pytest.mark.parametrize("command", ["status", "restart", "stop", "start"])
def test_boards_that_answer_junk_are_named(junk: str, command: str,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", command, "--cluster", junk, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    for found in told["boards"]:
        assert found["error"].startswith(f"{found['name']}: /bin/echo gave no answer: ")


@pytest.mark.parametrize("command", ["rollback", "down", "logs"])
def test_nothing_is_done_to_boards_that_answer_junk(junk: str, command: str,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", command, "--cluster", junk]) == 1
    *lines, last = capsys.readouterr().err.splitlines()
    silent = [f"board-{place}: /bin/echo gave no answer: " for place in range(2)]
    if command == "logs":
        assert last.startswith(f"flowspec: error: {silent[0]}")
    else:
        assert all(line.startswith(f"  {start}") for line, start in zip(lines[-2:], silent, strict=True))
        assert last == "flowspec: error: 2 errors; no board was touched"


@pytest.mark.parametrize("roles", ["decided", "auto"])
def test_the_draft_devices_journal_is_found_by_its_role(tmp_path: Path, roles: str,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    """With roles "auto" the board that drafts now is asked for; here none does."""
    file = write(tmp_path, "")
    if roles == "auto":
        file.write_text(re.sub('role = "[a-z]+"\n', "", file.read_text()))
    assert main(["deploy", "logs", "--cluster", str(file)]) == 1
    assert capsys.readouterr().err == (
        "flowspec: error: board-0: nothing is deployed there: flowspec deploy up\n")
    assert FleetStatus([board(1), board(0), board(2)]).draft.name == "board-0"
    assert FleetStatus([board(1), board(0, None, error="board-0: silent")]).draft.name == "board-0"


def test_what_a_board_says_does_nothing_to_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                      ) -> None:
    bad = "\x1b[2J[/red]\x9b1m\u202e"
    told = {"time": 0.0, "seconds": 0.0, "service": {
        "name": bad, "current": {"id": bad, "role": "draft", "stage": 0}, "ready": False, "reason": bad,
        "state": bad, "since": bad, "said": bad, "restarts": 10**40}}
    (tmp_path / "answer").write_text(json.dumps(told))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > /dev/null\ncat {tmp_path}/answer\n")
    python.chmod(0o755)
    assert main(["deploy", "status", "--cluster", str(write(tmp_path, f'board_python = "{python}"'))]) == 1
    out, err = capsys.readouterr()
    assert (out + err).replace("\n", "").isprintable()
    assert out.count(r"\x1b[2J[/red]") == 3  # of each board, and of the cluster; cells are shortened


def test_status_tells_the_watts_of_boards_that_measure_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    """By the system's own Python, without anything of ours."""
    cluster = str(write(tmp_path, ""))
    monkeypatch.setenv("FLOWSPEC_SYSFS", str(rail_files.board(tmp_path / "board", 9.5)))
    assert main(["deploy", "status", "--cluster", cluster, "--json"]) == 1  # nothing is deployed here
    told = json.loads(capsys.readouterr().out)
    assert [(found["error"], found["watts"]) for found in told["boards"]] == [("", 9.5)] * 2
    assert main(["deploy", "status", "--cluster", cluster]) == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split()[-1] == "power"
    assert shown.count("9.5 W") == 2
    monkeypatch.setenv("FLOWSPEC_SYSFS", str(tmp_path))
    assert main(["deploy", "status", "--cluster", cluster, "--json"]) == 1
    assert [found["watts"] for found in json.loads(capsys.readouterr().out)["boards"]] == [None] * 2
    assert main(["deploy", "status", "--cluster", cluster]) == 1
    assert "power" not in capsys.readouterr().out
