"""What the stages of a module's model are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.stages import Oracle


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)
