"""The models and profiles of the tests of clusters, a stage's loop, and a stage's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.cluster_fixtures import *  # noqa: F403

from flowspec_edge.drivers.stage.config import WorkerConfig


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    """Of a stage whose D0 never comes."""
    made = WorkerConfig(instance="v1", stage=1, stages=2, model=str(tiny_model / "target"), threads=1,
                        control="tcp://127.0.0.1:1", listen="tcp://127.0.0.1:*", next="tcp://127.0.0.1:2")
    path = tmp_path / "v1.toml"
    path.write_text(made.dump())
    return path
