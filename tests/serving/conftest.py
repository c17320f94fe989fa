"""A tiny model whose text is ASCII, and the text that plain decoding gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from servekit import Held
from tiny_dir import tiny_model_dir

from flowspec_edge.config import load_profile
from flowspec_edge.runtime.plain import PlainDecoder
from flowspec_edge.runtime.virtual import VirtualCluster


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("served"), layers=2, hidden=32, vocab=97)


@pytest.fixture(scope="session")
def plain(model: Path) -> PlainDecoder:
    return PlainDecoder(model)


@pytest.fixture
def held(model: Path) -> Held:
    return Held(VirtualCluster(model, 2, load_profile("paper-7b")))
