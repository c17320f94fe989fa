"""Boards with a real sshd each, which tests ask from a machine beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kits import ssh_boards


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_boards.Boards]:
    with ssh_boards.boards(2, tmp_path_factory.mktemp("boards")) as boards, boards.bed.entered(boards.outside):
        yield boards
