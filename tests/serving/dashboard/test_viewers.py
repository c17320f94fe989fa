"""A viewer's queue: bounded, and what it forgets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from kits.process_clusters import PATIENCE

from flowspec_edge.d0.request import Request
from flowspec_edge.serving.admission import Admission
from flowspec_edge.serving.dashboard.feed import Feed, Snapshot
from flowspec_edge.serving.dashboard.live import Description, Live, Viewer, encoded


def test_a_viewer_that_takes_nothing_keeps_the_newest() -> None:
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


class FailingFeed(Feed):
    def take_trees(self) -> list[Snapshot]:
        if self.watched:
            raise RuntimeError("no trees")
        return super().take_trees()


def no_statistics() -> dict[str, float]:
    raise OSError("no sensor")


@pytest.mark.parametrize(("stats", "fault"), [(dict, "no trees"), (no_statistics, "no sensor")])
def test_a_source_that_fails_is_logged_once_and_the_others_go_on(
        caplog: pytest.LogCaptureFixture, stats: Callable[[], dict[str, float]], fault: str) -> None:
    feed = FailingFeed() if fault == "no trees" else Feed()
    live = Live(feed, Admission(Request([0])), Description("m", "flowspec", "fp32", [None]), str, stats)

    async def watch() -> None:
        figures, enough = 0, asyncio.Event()

        async def receive() -> dict[str, str]:
            await enough.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal figures
            figures += message.get("body", b"").count(b"event: figures")
            if figures > 2:  # one is for the new viewer
                enough.set()

        await asyncio.wait_for(live({}, receive, send), PATIENCE)

    asyncio.run(watch())
    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == [fault]
    assert not feed.watched
