"""Runs a command of a board's image: what bin/flowspec and bin/python of a release are, where the runtime is an image.

On a board it is a program, with the image in ../image.json, for the board's own Python: standard library, Python 3.8.
A service's container is Docker's child and not systemd's, so what systemd gives to the service is handed on:

    signals        to the client of Docker, which sends them to the container
    notifications  of a socket in the unit's runtime directory, to systemd; so the loop that computes feeds the watchdog
    MemoryMax      of the unit, as the container's limit
    credentials    as copies in the runtime directory, in memory, for Docker does not see the unit's own
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_READ_ONLY = ("/opt/flowspec", "/var/lib/flowspec")
_CACHE = "/var/cache/flowspec"
_KEYS = "/etc/flowspec"
_GROUP = "docker"  # whose members may use Docker: the launcher, not what runs in the container
_SERVICE_USER = "flowspec"  # whom services run as
_USER = "FLOWSPEC_USER"  # as whom a tool's command runs in the container; without it: root
_SERVICE = "FLOWSPEC_CONTAINER"  # the container's name, which the unit sets; without it a command of a tool runs
_UNIT = "FLOWSPEC_UNIT"  # the unit's name
_PASSED_ON = ("HOME", "WATCHDOG_USEC", "FLOWSPEC_", "CUDA_", "HF_", "PYTHON", "PYTORCH_", "TRANSFORMERS_", "XDG_")
_NOTICES = ("READY=", "STATUS=", "STOPPING=", "WATCHDOG=", "WATCHDOG_USEC=", "EXTEND_TIMEOUT_USEC=")
_ENTRY = {"python": "python3"}  # the program's name here -> in the image
_KILLED = 137  # 128 + SIGKILL
_NO_LIMIT = 1 << 60  # older systemds show a number for "infinity"


class User(NamedTuple):
    """A user by its numbers on the board; ``groups`` besides its own."""

    user: int
    group: int
    groups: Sequence[int] = ()


class ServiceContainer(NamedTuple):
    """What a unit gives to its process."""

    name: str  # of the container
    runtime_directory: str
    credentials: str  # directory; "" without any
    memory: int | None  # bytes


def command(image: Mapping[str, str], program: str, arguments: Sequence[str], environment: Mapping[str, str],
            directory: str, user: User, service: ServiceContainer | None = None) -> list[str]:
    """Return the command that runs ``program`` of the image.

    image      image.json: image, and runtime, "" for Docker's default
    directory  the working directory, if the image has it, too
    service    None: a tool's command, which may write keys and models
    """
    run = ["docker", "run", "--rm", "--pull=never", "--network=host", f"--user={user.user}:{user.group}",
           *(f"--group-add={group}" for group in user.groups)]
    if image["runtime"]:
        run += ["--runtime=" + image["runtime"], "--env=NVIDIA_VISIBLE_DEVICES=all",
                "--env=NVIDIA_DRIVER_CAPABILITIES=all"]
    if service is None:
        # The processes are the board's, so that a second tool may end the first.
        run += ["--interactive", "--pid=host", _mount("/opt/flowspec", True), *(
            _mount(path, False) for path in ("/var/lib/flowspec", _KEYS, _CACHE) if os.path.isdir(path))]
    else:
        run += ["--init", "--name=" + service.name, "--log-driver=none", "--read-only", "--tmpfs=/tmp",
                "--cap-drop=ALL", "--security-opt=no-new-privileges", "--ulimit=core=0",
                *([f"--memory={service.memory}"] if service.memory else []),
                *(_mount(path, True) for path in _READ_ONLY), _mount(_CACHE, False),
                _mount(service.runtime_directory, False),
                f"--env=NOTIFY_SOCKET={service.runtime_directory}/notify"]
        if service.credentials:
            run.append(_mount(f"{service.runtime_directory}/credentials", True, service.credentials))
        run += ["--env=" + name for name in sorted(environment) if name.startswith(_PASSED_ON)]
    if any(directory == path or directory.startswith(path + "/") for path in _READ_ONLY):
        run.append("--workdir=" + directory)
    return [*run, "--entrypoint=" + _ENTRY.get(program, program), image["image"], *arguments]


def _mount(path: str, read_only: bool, target: str = "") -> str:
    return f"--mount=type=bind,source={path},target={target or path}" + (",readonly" if read_only else "")


def memory_limit(text: str) -> int | None:
    """Return a unit's MemoryMax, as systemctl shows it, in bytes; None for "infinity"."""
    return int(text) if text.strip().isdigit() and int(text) < _NO_LIMIT else None


def notice(output: bytes) -> bytes:
    """Return what of a container's notification is for systemd.

    A line that names a process is not, because the process has another number there.
    """
    lines = output.decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if line.startswith(_NOTICES)).encode()


def _user(name: str) -> User:
    """Return a user of the board, with its groups."""
    import grp
    import pwd

    entry = pwd.getpwnam(name)
    return User(entry.pw_uid, entry.pw_gid, [group.gr_gid for group in grp.getgrall()
                                             if name in group.gr_mem and group.gr_name != _GROUP])


def _service(name: str, environment: Mapping[str, str]) -> ServiceContainer:
    if not environment.get("RUNTIME_DIRECTORY"):
        sys.exit("this systemd unit was not written for a container image (RUNTIME_DIRECTORY is not set); write it "
                 "again with: flowspec deploy up")
    show = ["systemctl", "show", "--property=MemoryMax", "--value", environment.get(_UNIT, "")]
    memory = memory_limit(subprocess.run(show, capture_output=True, text=True, check=False).stdout)
    return ServiceContainer(name, environment["RUNTIME_DIRECTORY"], environment.get("CREDENTIALS_DIRECTORY", ""),
                            memory)


def _supervise(run: Sequence[str], service: ServiceContainer, environment: Mapping[str, str]) -> int:
    """Run the container of a service; return the exit code of its program."""
    _remove(service.name)  # what a power failure has left
    if service.credentials:
        shutil.copytree(service.credentials, f"{service.runtime_directory}/credentials")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(f"{service.runtime_directory}/notify")
        threading.Thread(target=_forward, args=(notices, environment.get("NOTIFY_SOCKET", "")), daemon=True).start()
        client = subprocess.Popen(run, stdin=subprocess.DEVNULL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):  # the last is the watchdog's
            signal.signal(number, lambda which, frame: client.send_signal(which))
        code = client.wait()
    if code == _KILLED:
        print("the container was killed: if not by hand, memory ran out, see dmesg", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _forward(notices: socket.socket, address: str) -> None:
    if not address:
        return
    target = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        while True:
            message = notice(notices.recv(1 << 16))
            with suppress(OSError):  # one that is lost is no reason to end
                if message:
                    systemd.sendto(message, target)


def _remove(name: str) -> None:
    subprocess.run(["docker", "rm", "--force", name], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, check=False)


def main() -> int:
    program, environment = Path(sys.argv[0]), os.environ
    image: dict[str, Any] = json.loads((program.parent.parent / "image.json").read_text(encoding="utf-8"))
    name = environment.get(_SERVICE, "")
    service = _service(name, environment) if name else None
    user = User(0, 0) if service is None and _USER not in environment else _user(environment.get(_USER, _SERVICE_USER))
    run = command(image, program.name, sys.argv[1:], environment, os.getcwd(), user, service)
    if shutil.which(run[0]) is None:
        sys.exit("there is no docker: sudo apt-get install docker.io")
    if service is None:
        prefix = [] if os.geteuid() == 0 else ["sudo", "-n", "--"]
        os.execvp((prefix + run)[0], prefix + run)
    return _supervise(run, service, environment)


if __name__ == "__main__":
    sys.exit(main())
