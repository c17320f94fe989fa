"""Whole boards for the tests: containers with systemd as process 1, sshd, and torch as a Jetson has it.

Five of them, each with a disk (an overlay over one image) and a network namespace of its own, all on
one switch with a sixth place, from which they are looked after.  Nothing of it outlives the process
that made it, even if that is killed: only its directory stays, and that is pytest's to remove.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from flowspec_edge.boards.commands import search_path
from flowspec_edge.lab.links.namespaces import NetnsTestbed
from kits import board_images, network_beds

USER = "jetson"
PATIENCE = 120.0  # seconds for a container to boot or to end: several at once, on slow machines
_REBOOT = 133  # how systemd-nspawn ends when its container wants to be started again
_TOOLS = (("systemd-nspawn", "systemd-container"), ("debootstrap", "debootstrap"),
          ("unshare", "util-linux"), ("setpriv", "util-linux"), ("nsenter", "util-linux"),
          ("ssh", "openssh-client"), ("ssh-keygen", "openssh-client"), ("rsync", "rsync"))
_CGROUP = "flowspec-fleet-"

# As JetPack has them: no pip, no ensurepip, but sudo without a password and rsync.
BOARD = board_images.Recipe(
    name="fleet", machine=platform.machine(),
    packages=("systemd", "systemd-sysv", "dbus", "openssh-server", "python3", "sudo", "iproute2", "rsync",
              "kmod", "procps", "ca-certificates"),
    wheels=("torch==2.13.0+cpu", "numpy"),
    constraints=board_images.pins("torch", "numpy", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
                              "fsspec", "filelock", "typing-extensions", "setuptools"),
    script=f"""
groupadd --system render
useradd --create-home --shell /bin/bash --groups sudo,video,render {USER}
echo '{USER} ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/{USER}
chmod 0440 /etc/sudoers.d/{USER}
rm /etc/ssh/ssh_host_*
printf 'PasswordAuthentication no\\nUseDNS no\\n' > /etc/ssh/sshd_config.d/board.conf
systemctl mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer
systemctl mask e2scrub_all.timer fstrim.timer
: > /etc/machine-id
""")


def why_no_fleet() -> str:
    """Why this machine can have no such boards; empty if it can."""
    return board_images.lacking(_TOOLS) or network_beds.why_no_bed() or _why_no_overlay()


@cache
def _why_no_overlay() -> str:
    """Why the boards' disks cannot be where temporary files are; empty if they can."""
    script = ("cd $0; mkdir disk work root; "
              "mount -t overlay overlay -o lowerdir=/etc,upperdir=disk,workdir=work root")
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(["unshare", "--mount", "--", "sh", "-ec", script, place], capture_output=True,
                              text=True, env={"PATH": search_path()}, check=False)
    if done.returncode:
        return f"no overlay in {Path(place).parent} (TMPDIR may name another place): {done.stderr.strip()}"
    return ""


needs_fleet = network_beds.needs("a fleet of containers", why_no_fleet())


class Fleet:
    """Boards 0…``boards`` − 1, all running, and the control place.  Close it, or use ``fleet``.

    ``recipes``: what each board's system is made of, ``BOARD`` if they are not given.
    """

    _numbers = itertools.count()  # of this process' fleets

    def __init__(self, directory: Path, boards: int = 5, recipes: Sequence[board_images.Recipe] = ()) -> None:
        self.directory, self.boards = directory, boards
        self._number = next(self._numbers)
        self._images = [board_images.image(recipe) for recipe in recipes or [BOARD] * boards]
        self._undo = ExitStack()
        remove_stale_cgroups()
        self._containers: dict[int, subprocess.Popen[bytes]] = {}
        self._leaders: dict[int, int] = {}
        self._notices: dict[int, socket.socket] = {}
        try:
            self._bed = self._undo.enter_context(NetnsTestbed(boards))
            self._undo.callback(self._stop_all)
            self._keys()
            for board in range(boards):
                self._prepare(board)
                self.start(board, wait=False)
            self.wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def ssh_config(self) -> Path:
        """For ssh's -F: knows the boards by name and by address, and has the key."""
        return self.directory / "ssh_config"

    @property
    def key(self) -> Path:
        """The private key that the boards let in as USER."""
        return self.directory / "key"

    def name(self, board: int) -> str:
        return f"board-{board}"

    def address(self, board: int) -> str:
        """The IPv4 address; ``boards`` is the control place."""
        return self._bed.address(board)

    def namespace(self, board: int) -> str:
        """A board's network namespace, as the kernel names it."""
        with self._bed.entered(board):
            return str(Path("/proc/thread-self/ns/net").readlink())

    def leader(self, board: int) -> int:
        """A board's process 1, as this machine numbers it."""
        return self._leaders[board]

    def command(self, argv: Sequence[str]) -> list[str]:
        """What to run for ``argv`` to run at the control place, on this machine's own files."""
        return self._bed.command(self.boards, argv)

    def run(self, argv: Sequence[str], timeout: float = PATIENCE,
            tree: Path = board_images.REPOSITORY) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` at the control place, in the directory ``tree``, to its end."""
        return subprocess.run(self.command(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=timeout, check=False, cwd=tree)

    def flowspec(self, *arguments: str, timeout: float = PATIENCE,
                 tree: Path = board_images.REPOSITORY) -> subprocess.CompletedProcess[str]:
        """Run a source tree's ``flowspec`` at the control place to its end."""
        return self.run([sys.executable, "-m", "flowspec_edge.cli.main", *arguments], timeout, tree)

    def ssh(self, board: int, command: str) -> subprocess.CompletedProcess[str]:
        """Run ``command`` on a board as USER, over ssh from the control place."""
        return self.run(["ssh", "-F", str(self.ssh_config), self.name(board), command])

    def shell(self, board: int, script: str, check: bool = True) -> str:
        """What a shell script says that root runs on a board, without ssh."""
        # The board's own environment; nothing of this machine's.
        inside = ["nsenter", f"--target={self._leaders[board]}", "--all", "--", "env", "-i", "HOME=/root",
                  "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]
        done = subprocess.run([*inside, "sh", "-ec", script], stdin=subprocess.DEVNULL, timeout=PATIENCE,
                              capture_output=True, text=True, check=False)
        assert not check or not done.returncode, f"board {board}: {script}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def changed(self, board: int, breaks: str, mends: str) -> Iterator[None]:
        """A board on which a script of root's has changed something, until another one has put it right."""
        self.shell(board, breaks)
        try:
            yield
        finally:
            self.shell(board, mends)

    def write_cluster(self, path: Path, members: Sequence[int] = (), **settings: object) -> Path:
        """A cluster.toml of ``members``, or all boards, ``settings`` in its [cluster]; the first drafts."""
        table = {"name": "fleet", "interface": self._bed.interface(0), "ssh_config": str(self.ssh_config),
                 **settings}
        lines = ["[cluster]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
        for board in members or range(self.boards):
            lines += ["", "[[device]]", f'name = "{self.name(board)}"', f'address = "{self.address(board)}"',
                      f'ssh_user = "{USER}"', f'ssh_key = "{self.key}"',
                      f'role = "{"verify" if board else "draft"}"']
        path.write_text("\n".join(lines) + "\n")
        return path

    def start(self, board: int, wait: bool = True) -> None:
        """Switch on a board that is off; it has the files that it had."""
        place = self.directory / self.name(board)
        (place / "notify").unlink(missing_ok=True)
        self._notices[board] = notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notices.bind(str(place / "notify"))
        notices.settimeout(PATIENCE)
        nspawn = ["systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--settings=no",
                  "--notify-ready=yes", "--console=pipe", "--resolv-conf=off", "--timezone=off",
                  "--link-journal=no", "--capability=CAP_NET_ADMIN",
                  "--network-namespace-path=/proc/self/ns/net",  # it is started in there
                  f"--machine={self.name(board)}", f"--directory={place}/root", *self._options(board)]
        store, mount, below = self._disk(board)
        lower = ":".join(map(str, [*below, self._images[board]]))
        layers = f"lowerdir={lower},upperdir={store}/disk,workdir={store}/work"
        start = _START.format(overlay=layers, root=f"{place}/root", mount=mount)
        procs = [str(group / "cgroup.procs") for group in self._cgroups(board, make=True)]
        # Process ids of its own: what is in there ends when this process does, as systemd-nspawn's
        # container would not; mounts of its own end with that.
        command = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--mount", "--pid", "--fork",
                   "--kill-child", "--mount-proc", "--", "sh", "-ec", start, "sh",
                   str(len(procs)), *procs, *nspawn]
        with (place / "console").open("ab") as console:
            self._containers[board] = subprocess.Popen(
                self._bed.command(board, command), stdin=subprocess.DEVNULL, stdout=console, stderr=console,
                start_new_session=True,  # Ctrl-C is for us
                env={"PATH": search_path(), "NOTIFY_SOCKET": str(place / "notify")})
        if wait:
            self.wait_ready(board)

    def wait_ready(self, *boards: int) -> None:
        """Wait until systemd has started everything on those boards, or on all."""
        for board in boards or range(self.boards):
            leader, ready = "", False
            while not ready:
                try:
                    notice = self._notices[board].recv(4096).decode()
                except TimeoutError:
                    console = (self.directory / self.name(board) / "console").read_text(errors="replace")
                    raise RuntimeError(f"board {board} does not boot: {console[-2000:]}") from None
                for line in notice.splitlines():
                    if line.startswith("X_NSPAWN_LEADER_PID="):
                        leader = line.partition("=")[2]
                    ready = ready or line == "READY=1"
            # Nothing reads on, and a process 1 that cannot send its next notice would stop for ever.
            self._notices.pop(board).close()
            self._leaders[board] = self._here(board, leader)

    def reboot(self, board: int) -> None:
        """Restart a board as `systemctl reboot` does, and wait until it is up again."""
        self.shell(board, "systemctl reboot", check=False)  # the shell may not live to see it done
        assert self._ended(board) == _REBOOT
        self.start(board)

    def switch_off(self, board: int) -> None:
        """As `systemctl poweroff` does; wait until all is written."""
        self.shell(board, "systemctl poweroff", check=False)
        self._ended(board)

    def cut_off(self, board: int) -> None:
        """Take a board's power away."""
        self._containers[board].kill()
        self._ended(board)

    def close(self) -> None:
        """End the boards and all that was made for them, but their directory.  Safe to call twice."""
        self._undo.close()

    def _here(self, board: int, leader: str) -> int:
        """This machine's number for the process that a board's systemd-nspawn knows as ``leader``."""
        for pid in network_beds.processes_in(self.namespace(board)):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:  # ended meanwhile
                continue
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
            if numbers[-2:] == [leader, "1"]:
                return pid
        raise RuntimeError(f"board {board} has no process 1")

    def _ended(self, board: int) -> int:
        """Wait for a board to end; how systemd-nspawn did."""
        status = self._containers.pop(board).wait(PATIENCE)
        if notices := self._notices.pop(board, None):
            notices.close()
        if leader := self._leaders.pop(board, 0):
            assert network_beds.ended(leader, PATIENCE)
        return status

    def _stop_all(self) -> None:
        for board in list(self._containers):
            self.cut_off(board)
        until = time.monotonic() + 5.0  # for all of them: there are up to a dozen for each board
        for board in range(self.boards):
            for group in self._cgroups(board):
                with suppress(OSError):  # a process is still ending: remove_stale_cgroups finds it later
                    _remove_cgroup(group, until)

    def _keys(self) -> None:
        if not self.key.exists():
            _make_key(self.key, "control")
        names = " ".join(f"{self.name(board)} {self.address(board)}" for board in range(self.boards))
        text = "".join(f"Host {self.name(board)}\n    HostName {self.address(board)}\n"
                       for board in range(self.boards))
        text += (f"Host {names}\n    User {USER}\n    IdentityFile {self.key}\n    IdentitiesOnly yes\n"
                 f"    UserKnownHostsFile {self.directory}/known_hosts\n    StrictHostKeyChecking yes\n")
        self.ssh_config.write_text(text)

    def _prepare(self, board: int) -> None:
        """What is on a board's disk beyond the image: who it is, and whom it lets in."""
        place = self.directory / self.name(board)
        for name in ("disk", "work", "root", "disk/etc/ssh", f"disk/home/{USER}/.ssh"):
            (place / name).mkdir(parents=True, mode=0o755)
        disk = place / "disk"
        (disk / "etc/hostname").write_text(f"{self.name(board)}\n")
        (disk / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
        (disk / "etc/hosts").write_text(f"127.0.0.1 localhost\n{self.address(board)} {self.name(board)}\n")
        host_key = disk / "etc/ssh/ssh_host_ed25519_key"
        _make_key(host_key, self.name(board))
        with (self.directory / "known_hosts").open("a") as known:
            public = host_key.with_name(f"{host_key.name}.pub").read_text()
            known.write(f"{self.address(board)},{self.name(board)} {public}")
        # Whose the directory is, the image says: numbers of its users, not of this machine's.
        home, owned = disk / "home" / USER, (self._images[board] / "home" / USER).stat()
        (home / ".ssh/authorized_keys").write_bytes(self.key.with_suffix(".pub").read_bytes())
        for path in (home, home / ".ssh", home / ".ssh/authorized_keys"):
            os.chown(path, owned.st_uid, owned.st_gid)
        (home / ".ssh").chmod(0o700)

    def _options(self, board: int) -> list[str]:
        """Further options of a board's systemd-nspawn."""
        return []

    def _disk(self, board: int) -> tuple[Path, str, list[Path]]:
        """The directory of a board's overlay, disk/ and work/, what has to be run to mount it, and the layers
        between it and the image, the upper first."""
        return self.directory / self.name(board), "", []

    def _cgroups(self, board: int, make: bool = False) -> list[Path]:
        """A board's control groups, one in each hierarchy: with a shared one, five systemds would take
        one another's services for their own."""
        name = f"{_CGROUP}{os.getpid()}-{self._number}-{self.name(board)}"
        groups = [parent / name for parent in _cgroup_parents()]
        if make:
            for group in groups:
                group.mkdir(exist_ok=True)
                # A group is as heavy as a process of niceness 0, however nice those in it are.
                for name, weight in (("cpu.shares", round(1024 / 1.25 ** os.nice(0))),
                                     ("cpu.weight.nice", os.nice(0))):
                    if (group / name).exists():
                        (group / name).write_text(str(weight))
        return [group for group in groups if group.is_dir()]


# Its mounts are its own: /run, where systemd-nspawn leaves things, and the disk.
_START = """
count=$1; shift
for i in $(seq $count); do echo 0 > "$1"; shift; done  # 0: the one that writes
mount -t tmpfs tmpfs /run
{mount}
mount -t overlay overlay -o {overlay} {root}
status=0; "$@" || status=$?
exit $status
"""


@contextmanager
def fleet(directory: Path, boards: int = 5) -> Iterator[Fleet]:
    """Boards that run while the block does; ``directory`` is empty, and their disks are in it."""
    running = Fleet(directory, boards)
    try:
        yield running
    finally:
        running.close()


def remove_stale_cgroups() -> None:
    """Remove the control groups, empty by then, of a process that was killed before it could do it."""
    for parent in _cgroup_parents():
        for group in parent.glob(f"{_CGROUP}*-*"):
            if not Path("/proc", group.name.removeprefix(_CGROUP).partition("-")[0]).exists():
                with suppress(OSError):  # something in it is still ending
                    _remove_cgroup(group)


def _cgroup_parents() -> list[Path]:
    """This process' own control group in each hierarchy."""
    mounted, found = Path("/sys/fs/cgroup"), []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers != "cpuset":  # wants settings before it lets anything in; systemd leaves it alone
            name = controllers.removeprefix("name=") or "unified"
            hierarchy = mounted / name if controllers or (mounted / name).is_dir() else mounted
            found.append(hierarchy / own.lstrip("/"))
    return found


def _remove_cgroup(group: Path, until: float = 0.0) -> None:
    """Remove a control group and those in it, which have to be empty by ``until`` (time.monotonic): killed
    processes leave theirs a moment after their container's process 1 has ended."""
    for inner in group.iterdir():
        if inner.is_dir():
            _remove_cgroup(inner, until)
    while True:
        try:
            return group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until:
                raise
            time.sleep(0.05)  # a control group of version 1 does not tell when it is empty: it is polled


def _make_key(path: Path, comment: str) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)],
                   check=True)
