"""How a command of an image is run; Docker carries it out in tests/e2e/test_deploy_image."""

from __future__ import annotations

import grp
import pwd

import pytest

from flowspec_edge.boards import paths
from flowspec_edge.boards.images import launcher
from flowspec_edge.boards.images.launcher import ServiceContainer, User, command, memory_limit, notice
from flowspec_edge.util.resources import resource_dir

IMAGE = {"image": "flowspec-board:abc", "runtime": ""}
SERVICE = ServiceContainer("flowspec-verify-1", "/run/flowspec-verify-1", "/run/credentials/unit", 5_000_000_000)
FLOWSPEC = User(999, 996, (44, 997))
RELEASE = paths.release_dir("r1")


def run(**image: str) -> list[str]:
    return command({**IMAGE, **image}, "flowspec", ["worker", "--config", "x.toml"],
                   {"HOME": "/var/cache/flowspec", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7", "SECRET": "x"},
                   RELEASE, FLOWSPEC, SERVICE)


def test_a_service_has_the_rights_of_its_unit_and_no_more() -> None:
    found = run()
    assert found[:3] == ["docker", "run", "--rm"]
    assert found[-5:] == ["--entrypoint=flowspec", "flowspec-board:abc", "worker", "--config", "x.toml"]
    for option in ("--network=host", "--init", "--name=flowspec-verify-1", "--user=999:996", "--group-add=44",
                   "--group-add=997", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges",
                   "--memory=5000000000", f"--workdir={RELEASE}", "--env=HOME", "--env=WATCHDOG_USEC",
                   "--env=NOTIFY_SOCKET=/run/flowspec-verify-1/notify"):
        assert option in found, option
    assert not any("WATCHDOG_PID" in option or "SECRET" in option for option in found)
    mounts = [dict(pair.partition("=")[::2] for pair in option.removeprefix("--mount=").split(","))
              for option in found if option.startswith("--mount=")]
    writable = {mount["source"] for mount in mounts if "readonly" not in mount}
    assert writable == {paths.CACHE, SERVICE.runtime_directory}
    read_only = {mount["target"] for mount in mounts if "readonly" in mount}
    assert read_only == {paths.HOME, paths.STATE, SERVICE.credentials}


def test_the_gpu_comes_by_nvidia_s_runtime_alone() -> None:
    assert "--runtime=nvidia" in run(runtime="nvidia")
    assert not any("nvidia" in option.lower() for option in run())


def test_a_tool_is_root_and_sees_the_board_s_processes() -> None:
    found = command(IMAGE, "python", ["-c", "print()"], {"HOME": "/root"}, "/home/me", User(0, 0))
    assert found[-4:] == ["--entrypoint=python3", "flowspec-board:abc", "-c", "print()"]
    assert {"--user=0:0", "--pid=host", "--interactive"} <= set(found)
    assert not any(option.startswith(("--workdir", "--name", "--env")) for option in found)


def test_a_service_has_the_groups_of_its_user_but_for_the_one_that_may_use_docker(monkeypatch: pytest.MonkeyPatch
                                                                                 ) -> None:
    name = pwd.getpwuid(0).pw_name
    groups = [grp.struct_group((group, "x", number, members)) for group, number, members in (
        ("video", 44, [name]), ("docker", 996, [name]), ("audio", 29, ["other"]))]
    monkeypatch.setattr(grp, "getgrall", lambda: groups)
    assert launcher._user(name) == User(0, pwd.getpwuid(0).pw_gid, [44])


@pytest.mark.parametrize(("shown", "limit"), [
    ("3221225472\n", 3 << 30), ("infinity\n", None), ("18446744073709551615\n", None), ("", None)])
def test_the_unit_s_memory_is_the_container_s(shown: str, limit: int | None) -> None:
    assert memory_limit(shown) == limit


def test_a_container_does_not_say_which_process_is_the_service() -> None:
    assert notice(b"READY=1\nSTATUS=V1 of 2\nMAINPID=1\nFDSTORE=1") == b"READY=1\nSTATUS=V1 of 2"
    assert notice(b"WATCHDOG=1") == b"WATCHDOG=1"
    assert notice(b"MAINPID=1") == b""


def test_the_unit_and_the_launcher_name_the_same_places() -> None:
    text = (resource_dir("deploy") / "units" / paths.IMAGE_CONF).read_text()
    assert f"\nEnvironment={launcher._SERVICE}=%p-%i {launcher._UNIT}=%n\n" in text
    assert "docker rm --force %p-%i " in text
    assert f"\nSupplementaryGroups={launcher._GROUP}\n" in text
    assert launcher._SERVICE_USER == paths.USER
    assert (*launcher._READ_ONLY, launcher._CACHE, launcher._KEYS) == (paths.HOME, paths.STATE, paths.CACHE, paths.ETC)
