"""SIGKILL of the process that started a local cluster: the workers and their fork server end, and remove
its directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kits.process_clusters import until

SERVES = """
import sys
from pathlib import Path
from flowspec_edge.drivers.processes.addresses import Loopback
from flowspec_edge.drivers.processes.forkserver import server_pid
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec, Here
from flowspec_edge.d0.request import Request
place = Loopback() if sys.argv[2] == "programs" else None
with ProcessCluster(ClusterSpec(Path(sys.argv[1]), int(sys.argv[3]), threads=1), Here(place)).start() as cluster:
    cluster.generate(Request(list(range(9)), "autoregressive", 2))
    print(server_pid() or "", *cluster.pids, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "stages", "processes"), [("forks", 1, 2), ("programs", 1, 1)])
def test_nothing_is_left(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str,
                         stages: int, processes: int) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", SERVES, str(tiny_model), workers, str(stages)],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        pids = [int(pid) for pid in serving.stdout.readline().split()]
        assert len(pids) == processes
        assert len(list(tmp_path.glob("flowspec-*/v?.toml"))) == stages
        serving.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    until(lambda: not [path for path in tmp_path.iterdir() if path.name.startswith("flowspec-")])
