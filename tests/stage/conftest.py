"""The model of most tests of stages, and what a module's is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.stages import Oracle
from kits.tiny_models import tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four layers, for modules without a ``model`` of their own, which only read it."""
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=4, hidden=32)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)
