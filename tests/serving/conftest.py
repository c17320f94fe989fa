"""A tiny model whose text is ASCII, the text that plain decoding gives, and two stages as processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.http_server import AT_ONCE, Held, Watch
from kits.tiny_model_dir import never_ends, tiny_model_dir

from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.lab.plain import PlainDecoder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return never_ends(tiny_model_dir(tmp_path_factory.mktemp("served"), layers=2, hidden=32, vocab=97))


@pytest.fixture(scope="session")
def plain(model: Path) -> PlainDecoder:
    return PlainDecoder(model)


@pytest.fixture(scope="session")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="session")
def processes(model: Path, watch: Watch) -> Iterator[ProcessCluster]:
    """For all tests of a process, one after the other; new stages come up if one has killed them."""
    with open_cluster(ClusterSpec(model, 2, threads=1, at_once=AT_ONCE, observer=watch)) as clusters:
        yield clusters


@pytest.fixture
def held(processes: ProcessCluster) -> Held:
    return Held(processes)
