"""Commands in this process report no progress, however slow it is: their whole output is compared."""

from __future__ import annotations

import pytest

from flowspec_edge.cli.common import progress


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 3600.0)
