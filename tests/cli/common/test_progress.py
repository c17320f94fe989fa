"""Progress without a terminal: lines on stderr while work takes long."""

from __future__ import annotations

import re
import threading
import time

import pytest
from kits.process_clusters import PATIENCE
from kits.process_clusters import until as wait_until

from flowspec_edge.cli.common import progress as progress_module
from flowspec_edge.cli.common.progress import done_of, progress


def test_long_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch,
                                      capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress_module, "_EVERY_S", 0.01)
    said, until = "", time.monotonic() + PATIENCE
    with progress(8, "sweep") as advance:
        advance("chunk_pp")
        advance("flowspec")  # one step is done
        while not re.search(r"^flowspec: sweep: 1 of 8 runs, \d+ s", said, re.MULTILINE):
            assert time.monotonic() < until, said
            said += capfd.readouterr().err
    wait_until(lambda: "progress" not in {thread.name for thread in threading.enumerate()})


def test_what_is_left_follows_from_what_is_done() -> None:
    assert done_of(12, 64, 35, "runs") == "12 of 64 runs, 35 s, about 152 s left"
    assert done_of(0, 64, 5, "runs") == "0 of 64 runs, 5 s"
