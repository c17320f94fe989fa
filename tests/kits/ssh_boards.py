"""Boards for the tests: devices of a bed, each with a real sshd, and a /run and a /var/lib of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import flowspec_edge
from flowspec_edge.boards.commands import search_path
from flowspec_edge.boards.inventory import Inventory, load_inventory
from flowspec_edge.lab.links.namespaces import NetnsTestbed
from kits import network_beds

_SSHD = """
ListenAddress {address}
Port {port}
HostKey {directory}/host
AuthorizedKeysFile /run/user.pub
StrictModes no
UsePAM no
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
SetEnv PYTHONPATH={package}
"""


def why_no_boards() -> str:
    """Why this machine can have no such boards; empty if it can."""
    for tool, package in (("sshd", "openssh-server"), ("ssh", "openssh-client"), ("setpriv", "util-linux")):
        if shutil.which(tool, path=search_path()) is None:
            return f"{tool} is missing (Debian package {package})"
    return network_beds.why_no_bed()


needs_boards = network_beds.needs("boards with a real sshd", why_no_boards())


class Boards:
    """Places 0…``stages`` of ``bed`` as boards; ``outside`` is one more place, with no sshd."""

    def __init__(self, bed: NetnsTestbed, stages: int, directory: Path, undo: ExitStack) -> None:
        self.bed, self.outside, self.directory = bed, stages + 1, directory
        self._servers: dict[int, int] = {}  # process ids
        # A socket's path must be short, and a test's own directory may not be.
        self._shared = Path(undo.enter_context(TemporaryDirectory(prefix="ssh-")))
        for name in ("host", "user", "stranger"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)],
                           check=True)
        public = (directory / "host.pub").read_text()
        places = range(stages + 1)
        (directory / "known").write_text("".join(f"{bed.address(place)} {public}" for place in places))
        (directory / "config").write_text(f"UserKnownHostsFile {directory}/known\nStrictHostKeyChecking yes\n"
                                          f"KexAlgorithms curve25519-sha256\nControlMaster auto\n"
                                          f"ControlPath {self._shared}/%C\nControlPersist 60\n")
        for place in places:
            undo.enter_context(self.sshd(place))
        undo.callback(self.disconnect)
        text = f'[cluster]\nname = "bed"\npython = "{sys.executable}"\nssh_config = "{directory}/config"\n'
        for place in places:
            text += (f'[[device]]\nname = "board-{place}"\naddress = "{bed.address(place)}"\n'
                     'ssh_user = "root"\n'
                     f'ssh_key = "{directory}/user"\n'
                     f'role = "{"verify" if place else "draft"}"\n')
        self.file = directory / "cluster.toml"
        self.file.write_text(text)
        self.inventory: Inventory = load_inventory(self.file)

    def with_cluster(self, **settings: object) -> Inventory:
        """The inventory with other settings in its [cluster]."""
        return self.inventory.model_copy(update={"cluster": self.inventory.cluster.model_copy(update=settings)})

    def shown(self, place: int) -> str:
        """What ``tc`` says of a board's interface."""
        show = ["tc", "qdisc", "show", "dev", self.bed.interface(place)]
        return subprocess.run(self.bed.command(place, show), capture_output=True, text=True,
                              check=True).stdout

    def tc(self, place: int, *arguments: str) -> None:
        subprocess.run(self.bed.command(place, ["tc", *arguments]), check=True)

    def namespace(self, place: int) -> str:
        with self.bed.entered(place):
            return str(Path("/proc/thread-self/ns/net").readlink())

    def running(self, place: int, command: str) -> list[int]:
        """Processes of a board whose command line begins with ``command``."""
        found = network_beds.processes_in(self.namespace(place))
        return [pid for pid, line in sorted(found.items()) if line.startswith(command)]

    def root(self, place: int) -> Path:
        """A board's file system."""
        return Path(f"/proc/{self._servers[place]}/root")

    def inside(self, place: int, *argv: str) -> None:
        """Run a command in a board's file system, as root."""
        subprocess.run(["nsenter", f"--target={self._servers[place]}", "--mount", "--", *argv], check=True)

    @contextmanager
    def shell(self, place: int, script: str) -> Iterator[None]:
        """A board where root's login shell is ``script``, which gets "-c" and a command as arguments."""
        own, users = self.root(place) / "run" / "shell", Path("/etc/passwd").read_text()
        own.write_text(f"#!/bin/sh\n{script}\n")
        own.chmod(0o755)
        with_it, without = (self.directory / f"passwd{place}{name}" for name in ("", "-before"))
        with_it.write_text(re.sub(r"^(root:.*:).*$", r"\1/run/shell", users, flags=re.MULTILINE))
        without.write_text(users)
        self.inside(place, "mount", "--bind", str(with_it), "/etc/passwd")
        try:
            yield
        finally:
            self.inside(place, "mount", "--bind", str(without), "/etc/passwd")

    def left(self, place: int, command: str, newest: int = 0) -> int:
        """How many of those there are, once all but so many of the ``newest`` have had time to end: what
        was killed may still be there for a moment."""
        pids = self.running(place, command)
        for pid in pids[: len(pids) - newest]:
            network_beds.ended(pid, 60)
        return len(self.running(place, command))

    def disconnect(self) -> None:
        """End the connections that commands shared: over an open one, any key or host name lets them in."""
        for path in self._shared.glob("?" * 40):
            subprocess.run(["ssh", "-F", "none", "-o", f"ControlPath={path}", "-O", "exit", "any"],
                           capture_output=True, check=True)

    @contextmanager
    def sshd(self, place: int, port: int = 22) -> Iterator[None]:
        """A server at a place, in a file system and with processes of its own."""
        config = self.directory / f"sshd{place}"
        config.write_text(_SSHD.format(address=self.bed.address(place), port=port, directory=self.directory,
                                       package=Path(flowspec_edge.__file__).parent.parent))
        # Process ids of its own, so that whatever a test leaves there ends with it; and its own /run.
        start = ("mount -t tmpfs tmpfs /run && mkdir /run/sshd && mount -t tmpfs tmpfs /var/lib && "
                 f"cp {self.directory}/user.pub /run && "  # where any user's sshd may read it
                 f"echo {uuid.uuid4().hex} > /run/machine-id && "
                 "{ [ ! -e /etc/machine-id ] || mount --bind /run/machine-id /etc/machine-id; } && "
                 "for file in ~/.bashrc; do [ -e $file ] && mount --bind /dev/null $file; done; "
                 f"exec {shutil.which('sshd', path=search_path())} -D -e -f {config}")
        command = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--mount", "--pid", "--fork",
                   "--kill-child", "--mount-proc", "--", "sh", "-c", start]
        with subprocess.Popen(self.bed.command(place, command), stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                assert "listening" in server.stderr.readline()
                self._servers[place] = server.pid
                yield
            finally:
                server.kill()


@contextmanager
def boards(stages: int, directory: Path) -> Iterator[Boards]:
    """A draft board, ``stages`` verify boards, and a place to look at them from."""
    with ExitStack() as undo:
        bed = undo.enter_context(NetnsTestbed(stages + 1))
        yield Boards(bed, stages, directory, undo)
