"""A viewer's queue: bounded, and what it forgets."""

from __future__ import annotations

import asyncio

import pytest

from flowspec_edge.serving.viewers import Viewer, encoded


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
