"""The boards that tests of the whole thing share: they are booted once."""

from __future__ import annotations

from collections.abc import Iterator

import deploykit
import nspawnkit
import pytest


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nspawnkit.Fleet]:
    """Five boards, freshly made, and on: a test leaves them as bare as it found them, and on."""
    with nspawnkit.fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture(scope="session")
def cluster(fleet: nspawnkit.Fleet, tmp_path_factory: pytest.TempPathFactory) -> deploykit.Cluster:
    """A cluster file for the boards, and the wheels that they need; nothing is deployed yet."""
    return deploykit.Cluster(fleet, tmp_path_factory.mktemp("cluster"))
