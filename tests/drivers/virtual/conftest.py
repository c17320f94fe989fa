"""Models of every family that are made when a test wants them."""

from __future__ import annotations

import pytest
from kits.family_checkpoints import FamilyDirs


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> FamilyDirs:
    return FamilyDirs(tmp_path_factory.mktemp("families"))
