"""A request's handle as a Future: callbacks run once in the thread that answers, and cancelling asks."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from flowspec_edge.d0.request import Request, RequestHandle, Result
from flowspec_edge.errors import PeerLost


def test_callbacks_run_once_in_the_thread_that_answers() -> None:
    handle, calls = RequestHandle(Request([1])), list[tuple[BaseException | None, int]]()

    def callback(future: Future[Result]) -> None:
        calls.append((future.exception(), threading.get_ident()))

    for _ in range(2):
        handle.add_done_callback(callback)
    lost = PeerLost("V1 has left")
    driver = threading.Thread(target=handle.set_exception, args=(lost,))
    driver.start()
    driver.join()
    assert calls == [(lost, driver.ident)] * 2
    handle.add_done_callback(callback)
    assert calls[2:] == [(lost, threading.get_ident())]
    with pytest.raises(PeerLost, match="V1 has left"):
        handle.result(0)


def test_cancelling_asks_for_a_result() -> None:
    handle, found = RequestHandle(Request([1])), list[bool]()
    handle.add_done_callback(lambda future: found.append(future.done()))
    assert handle.cancel()
    assert handle.cancel_requested
    assert not handle.done()
    assert not handle.cancelled()
    assert found == []
    handle.set_cancelled()
    assert found == [True]
    assert (handle.result(0).tokens, handle.result(0).finish_reason) == ([], "cancelled")
    assert not handle.cancel()
