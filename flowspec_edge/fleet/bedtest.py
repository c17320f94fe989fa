"""What the links of a bed really give: every device's, measured while nothing else is sent.

Knows who sends to whom in a pipeline.  Does not know how a measurement goes (``linktest``).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from flowspec_edge.fleet.linktest import LinkMeasure, measure_link, serve_link
from flowspec_edge.fleet.netbed import NetBed

_PATIENCE_S = 30.0


def measure_bed(bed: NetBed, seconds: float = 0.4) -> list[LinkMeasure]:
    """Each device's link to the next one, D0's first; the last device's next one is D0.

    ``seconds`` of data for each, one after the other.
    """
    return [_measured(bed, place, (place + 1) % bed.places, seconds) for place in range(bed.places)]


def _measured(bed: NetBed, sender: int, receiver: int, seconds: float) -> LinkMeasure:
    port: Future[int] = Future()

    def serve() -> None:
        try:
            with bed.entered(receiver):
                serve_link(bed.address(receiver), 0, _PATIENCE_S, 1, port.set_result)
        except BaseException as error:
            if port.done():
                raise
            port.set_exception(error)

    def measure() -> LinkMeasure:
        with bed.entered(sender):
            return measure_link(bed.address(receiver), port.result(_PATIENCE_S), seconds)

    with ThreadPoolExecutor(2) as pool:
        serving, measuring = pool.submit(serve), pool.submit(measure)
        found = measuring.result()
        serving.result()
    return found
