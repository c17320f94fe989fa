"""A viewer's queue: bounded, and what it forgets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowspec_edge.runtime.request import Request
from flowspec_edge.serving.admission import AdmissionQueue
from flowspec_edge.serving.dashboard.feed import Feed
from flowspec_edge.serving.dashboard.live import Description, Live, Viewer, encoded
from flowspec_edge.serving.dashboard.snapshots import Snapshot


def test_a_viewer_that_takes_nothing_keeps_the_newest_and_no_more() -> None:
    async def take() -> bytes:
        viewer = Viewer()
        for number in range(10_000):
            viewer.put("figures", encoded("figures", {"number": number}))
            viewer.put("flow", encoded("flow", {"number": number}))
        return await viewer.take()

    events = asyncio.run(take()).decode().split("\n\n")[:-1]
    assert events[-2:] == ['event: figures\ndata: {"number": 9999}', 'event: flow\ndata: {"number": 9999}']
    assert 10 < len(events) < 100
    assert sum(event.startswith("event: figures") for event in events) == 1


def test_waiting_ends_with_the_next_event() -> None:
    async def take() -> bytes:
        viewer = Viewer()
        coming = asyncio.ensure_future(viewer.take())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(coming), 0.01)
        viewer.put("tree", b"tree")
        return await coming

    assert asyncio.run(take()) == b"tree"


class FailingFeed(Feed):
    failures = 2

    def take_trees(self) -> list[Snapshot]:
        if self.watched and self.failures:
            self.failures -= 1
            raise RuntimeError("no trees")
        return super().take_trees()


def test_errors_are_logged_and_later_events_come(caplog: pytest.LogCaptureFixture) -> None:
    live = Live(FailingFeed(), AdmissionQueue(Request([0])), Description("m", "flowspec", "fp32", [None]),
                str, dict)

    async def watch() -> None:
        boards, enough = 0, asyncio.Event()

        async def receive() -> dict[str, str]:
            await enough.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal boards
            boards += message.get("body", b"").count(b"event: boards")
            if boards > 1:  # one is for the new viewer
                enough.set()

        await asyncio.wait_for(live({}, receive, send), 10)

    asyncio.run(watch())
    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == ["no trees"] * 2
