"""The log's lines are limited, and what is left out is counted."""

from __future__ import annotations

import io
import logging

from flowspec_edge.serving.access_log import AccessRecord, LimitedHandler, LogFormatter


def lines_of(handler: LimitedHandler) -> list[str]:
    assert isinstance(handler.stream, io.StringIO)
    return handler.stream.getvalue().splitlines()


def test_lines_of_a_kind_are_limited_and_counted() -> None:
    now = 0.0
    handler = LimitedHandler(most=3, clock=lambda: now)
    handler.setStream(io.StringIO())
    handler.setFormatter(LogFormatter(as_json=False))
    logger = logging.Logger("a")
    logger.addHandler(handler)
    for number in range(10):
        logger.warning("refused %d", number)
        logger.info("/path", extra={"record": AccessRecord("/path", status=400)})
        logger.info("/path", extra={"record": AccessRecord("/path")})
    logger.error("once")
    lines = lines_of(handler)
    assert [sum(kind in line for line in lines) for kind in ("refused", " 400 ", " 200 ", "once")] \
        == [3, 3, 10, 1]
    now = 61.0
    logger.error("another")
    assert [line.split("WARNING ")[1] for line in lines_of(handler)[len(lines):-1]] == [
        "7 more lines in a minute, like 'refused %d', were left out",
        "7 more lines in a minute, of requests with status 400, were left out"]
    for _ in range(5):
        logger.error("another")
    handler.close()
    assert "3 more lines in a minute, like 'another', were left out" in lines_of(handler)[-1]


def test_what_a_client_sent_is_one_line_without_terminal_escapes() -> None:
    about = AccessRecord("/path", status=404, error="no 'a\n\x1b]0;b\x07'")
    [line] = LogFormatter(as_json=False).format(logging.makeLogRecord({"record": about})).splitlines()
    assert line.endswith(r"no 'a \x1b]0;b\x07'")
