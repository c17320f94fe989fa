"""``--trace F``: a request's trace as a file.

Knows when the file is written and what is said of it.  Does not know the format (``runtime.trace_events``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowspec_edge.bench.output import write
from flowspec_edge.runtime.request import Request

if TYPE_CHECKING:
    from flowspec_edge.runtime.observer import Observer

TraceOption = Annotated[Path | None, typer.Option(
    "--trace", metavar="F", show_default=False, help=(
        "Write who did what when, for every segment: a file for ui.perfetto.dev."))]


@contextmanager
def traced(path: Path | None, request: Request, stages: int, about: dict[str, Any],
           decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> Iterator[Observer | None]:
    """Who is to watch the request; the file is written on the way out, whole, whatever ends the request.

    Nobody and no file without a ``path``, and no file of a request that never began.  The rest is as
    ``runtime.trace_events.chrome_trace`` has it.
    """
    if path is None:
        yield None
        return
    from flowspec_edge.runtime.trace import Trace
    from flowspec_edge.runtime.trace_events import chrome_trace

    trace = Trace(request)
    try:
        yield trace
    finally:
        if trace.parts:
            write(path, json.dumps(chrome_trace(trace, stages, about, decode, before), ensure_ascii=False))
        told = ("the request had not begun, so there is no trace" if not trace.parts else
                f"its trace is in {path}" if trace.settled_at is not None else
                f"the trace up to here is in {path}")
        print(f"flowspec: {told}", file=sys.stderr)
