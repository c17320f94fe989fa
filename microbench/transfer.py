"""What sending a board its part takes, beside what ssh alone gives.

A real sshd in a network namespace, on a link as fast as this machine: so the two ends share its
processors, and what a board does beside receiving counts in full.  In turn, ssh carries so many zeros to
``cat > /dev/null`` there, and a part of as many random bytes is pushed into an empty directory: hashed,
written to the disk, synced, renamed.  Then once more, when all is there.  It needs root.

    python -m microbench.transfer [--mb 512] [--runs 3]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import flowspec_edge
from flowspec_edge.boards.commands import SshRunner, search_path
from flowspec_edge.boards.inventory import ClusterSettings, DeviceEntry, Inventory
from flowspec_edge.boards.transfer.push import push
from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.links.namespaces import NetnsTestbed
from flowspec_edge.model.manifest import Manifest, ModelOrigin, PartFile, ShardPart
from flowspec_edge.util.bounded_read import sha256_of

_SSHD = """
ListenAddress {address}
HostKey {directory}/host
AuthorizedKeysFile {directory}/user.pub
StrictModes no
UsePAM no
PidFile none
PermitRootLogin prohibit-password
SetEnv PYTHONPATH={package}
"""
_PIECE = 1 << 20


@contextmanager
def board(directory: Path) -> Iterator[Inventory]:
    """Run a board that this thread reaches over ssh alone inside the block."""
    sshd = shutil.which("sshd", path=search_path())
    if sshd is None:
        raise FlowspecError("sshd is missing (Debian package openssh-server)")
    with NetnsTestbed(1) as bed:
        address = bed.address(0)
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)],
                           check=True)
        (directory / "sshd").write_text(_SSHD.format(
            address=address, directory=directory, package=Path(flowspec_edge.__file__).parent.parent))
        (directory / "known").write_text(f"{address} {(directory / 'host.pub').read_text()}")
        (directory / "config").write_text(f"UserKnownHostsFile {directory}/known\n")
        inside = ["unshare", "--mount", "--", "sh", "-c", "mount -t tmpfs tmpfs /run && mkdir /run/sshd && "
                  f"exec {sshd} -D -e -f {directory}/sshd"]
        with subprocess.Popen(bed.command(0, inside), stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            try:
                if "listening" not in (line := server.stderr.readline()):
                    raise FlowspecError(f"sshd does not start: {line.strip()}")
                device = DeviceEntry(name="board", address=address, role="verify", ssh_user="root",
                                     ssh_key=str(directory / "user"))
                draft = device.model_copy(update={"name": "draft", "role": "draft",
                                                  "address": bed.address(1)})
                with bed.entered(1):
                    yield Inventory(cluster=ClusterSettings(name="bed", ssh_config=str(directory / "config")),
                                    device=[draft, device])
            finally:
                server.kill()


def write_model(directory: Path, size: int) -> Manifest:
    path = directory / "stage-1/model.safetensors"
    path.parent.mkdir(parents=True)
    with open("/dev/urandom", "rb") as noise, path.open("wb") as file:
        for at in range(0, size, _PIECE):
            file.write(noise.read(min(_PIECE, size - at)))
    files = (PartFile(path="stage-1/model.safetensors", size=size, sha256=sha256_of(path)),)
    manifest = Manifest(
        format=1, source=ModelOrigin(name="noise", config_sha256="0" * 64), model_type="llama", layers=1,
        hidden_width=1, vocabulary=1, ranges=((0, 1),), dtype="fp16", compute_dtype="fp16", quantisation=None,
        request="0" * 64, parts={"stage-1": ShardPart(files=files, parameters=0, weight_bytes=0, row_bytes=0),
                                 "draft": ShardPart(files=(), parameters=0, weight_bytes=0, row_bytes=0)})
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return Manifest.read(directory)


def ssh_alone(inventory: Inventory, size: int) -> float:
    """Measure the seconds for ``size`` zeros, the connection included."""
    runner = SshRunner(inventory, inventory.verify[0], own_connection=True)
    start = time.perf_counter()
    with subprocess.Popen(["head", "-c", str(size), "/dev/zero"], stdout=subprocess.PIPE) as zeros:
        subprocess.run(runner.command(["sh", "-c", "cat > /dev/null"]), stdin=zeros.stdout, check=True)
    return time.perf_counter() - start


def push_part(inventory: Inventory, model: Manifest, models: Path) -> float:
    start = time.perf_counter()
    (result,) = push(model.directory, [(inventory.verify[0], "stage-1", sys.executable)], inventory,
                     models=str(models))
    if result.error:
        raise FlowspecError(result.error)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512, help="10^6 bytes")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    size = options.mb * 1_000_000
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            with board(directory) as inventory:
                model = write_model(directory / "model", size)
                alone, whole_times, again = [], [], []
                for run in range(options.runs):
                    alone.append(ssh_alone(inventory, size))
                    models = directory / f"models{run}"
                    whole_times.append(push_part(inventory, model, models))
                    again.append(push_part(inventory, model, models))
                    shutil.rmtree(models)
        except FlowspecError as error:
            print(f"left out: {error}")
            return
    print(f"ssh alone            {size / 1e6 / median(alone):8.1f} MB/s")
    print(f"a part, whole        {size / 1e6 / median(whole_times):8.1f} MB/s")
    ratio = median(mine / theirs for mine, theirs in zip(alone, whole_times, strict=True))
    print(f"of what ssh gives    {ratio:8.2f}")
    print(f"once all is there    {median(again):8.2f} s")


if __name__ == "__main__":
    main()
