"""Stages that are lost again and again for one cause; random losses are in test_everything_soak and in tests/chaos."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from kits.process_clusters import PATIENCE
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import PeerLost

LONG = [(11 * i + 5) % 290 for i in range(150)]  # three chunks
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=4)


@pytest.mark.soak
def test_a_stage_that_ends_again_and_again_is_given_up(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    with ProcessCluster(ClusterSpec(copy, 2, threads=1, rejoin_within=10 * PATIENCE)).start() as cluster:
        (copy / "target" / "model.safetensors").unlink()
        os.kill(cluster.pids[0], signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"no model at .*; restarted 5 times without success"):
            cluster.generate(Request(LONG, "autoregressive", 8))
