"""SIGKILL of the process that started a local cluster: the workers end, and remove its directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from clusterkit import until

SERVES = """
import sys
from pathlib import Path
from flowspec_edge.runtime.cluster.addresses import Loopback
from flowspec_edge.runtime.cluster.process_cluster import ProcessCluster
from flowspec_edge.runtime.request import Request
place = Loopback() if sys.argv[2] == "programs" else None
with ProcessCluster(Path(sys.argv[1]), 2, threads=1, placement=place) as cluster:
    cluster.generate(Request(list(range(9)), "autoregressive", 2))
    print(*cluster.pids, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("workers", ["forks", "programs"])
def test_nothing_is_left(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
                         ) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", SERVES, str(tiny_model), workers], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        pids = [int(pid) for pid in serving.stdout.readline().split()]
        assert len(pids) == 2
        assert len(list(tmp_path.glob("flowspec-*/v?.toml"))) == 2
        serving.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    until(lambda: not [path for path in tmp_path.iterdir() if path.name.startswith("flowspec-")])
