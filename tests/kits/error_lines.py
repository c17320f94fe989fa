"""What a command says that is refused."""

from __future__ import annotations

import pytest


def error_line(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The one line of a command that has exited with ``code``, which is that of a usage error, and has printed
    nothing else."""
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("flowspec: error: ")
    return err
