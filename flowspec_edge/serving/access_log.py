"""The access log: one line per request, with its figures and outcome but never its text."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from flowspec_edge.util.terminal import printable

requests = logging.getLogger("flowspec_edge.serving.requests")

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that closed its connection


@dataclass
class AccessRecord:
    """One request.

    Times are seconds since its arrival, None for events that did not happen. ``energy_j``: of all boards; None if
    it was not measured, or if a stop string ended the answer.
    """

    path: str
    id: str | None = None
    status: int = 200
    finish: str | None = None
    strategy: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    energy_j: float | None = None
    queued_s: float | None = None
    first_token_s: float | None = None
    seconds: float = 0.0
    error: str | None = None
    _start: float = field(default_factory=time.monotonic, repr=False)
    _token_at: float | None = field(default=None, repr=False)  # when the newest token came

    def add_tokens(self, at: float, count: int) -> list[float]:
        """Note that ``count`` tokens came together, ``at`` in seconds of time.monotonic.

        Return the seconds between each token and the one before it; the answer's first token has no entry.
        """
        gaps = [0.0] * (count - 1)
        if self._token_at is None:
            self.first_token_s = at - self._start
        else:
            gaps.insert(0, at - self._token_at)
        self._token_at = at
        return gaps

    def write(self) -> None:
        self.seconds = time.monotonic() - self._start
        requests.info("%s", self.path, extra={"record": self})

    def as_json(self) -> str:
        return json.dumps({name: round(value, 4) if isinstance(value, float) else value
                           for name, value in asdict(self).items() if not name.startswith("_")})

    def __str__(self) -> str:
        queued = "" if self.queued_s is None else f", queued {self.queued_s:.2f} s"
        outcome = printable(" ".join((self.error or self.finish or "client gone").split()))
        tokens = f"{self.prompt_tokens} + {self.completion_tokens} tokens"
        energy = "" if self.energy_j is None else f", {self.energy_j:.1f} J"
        amounts = f"{tokens} in {self.seconds:.2f} s{queued}{energy}"
        return f"{self.path} {self.status} {self.id or '-'}: {amounts}, {outcome}"


class LimitedHandler(logging.StreamHandler):  # type: ignore[type-arg]  # not generic in Python 3.10
    """Writes to stderr, at most some lines a minute of each kind, so that no client can fill the disk.

    The others are counted. Lines of answered requests are not limited: the cluster can answer only so many.
    """

    def __init__(self, most: int = 60, clock: Callable[[], float] = time.monotonic) -> None:
        """Limit lines to ``most`` a minute, of one logger, template and HTTP status."""
        super().__init__()
        self._most, self._clock = most, clock
        self._kinds: dict[tuple[object, ...], _Minute] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self._end_minutes(self._clock() - 60)
        about: AccessRecord | None = getattr(record, "record", None)
        if about is not None and about.status == 200:
            super().emit(record)
            return
        kind = (record.name, record.msg, about and about.status)
        minute = self._kinds.setdefault(kind, _Minute(self._clock()))
        minute.lines += 1
        if minute.lines <= self._most:
            super().emit(record)

    def close(self) -> None:
        self._end_minutes(math.inf)
        super().close()

    def _end_minutes(self, before: float) -> None:
        """Forget the minutes that began ``before``, and report what they left out."""
        for kind, minute in list(self._kinds.items()):
            if minute.start > before:
                continue
            del self._kinds[kind]
            if minute.lines > self._most:
                name, template, status = kind
                like = f"of requests with status {status}" if status else f"like {template!r:.200}"
                super().emit(logging.LogRecord(
                    str(name), logging.WARNING, "", 0, "%d more lines in a minute, %s, were left out",
                    (minute.lines - self._most, like), None))


@dataclass
class _Minute:
    start: float
    lines: int = 0


class LogFormatter(logging.Formatter):
    """Log lines with timestamps, as text or as JSON objects."""

    def __init__(self, as_json: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        about: AccessRecord | None = getattr(record, "record", None)
        if self._as_json:
            when = {"time": round(record.created, 3), "level": record.levelname}
            if about is not None:
                return json.dumps(when | {"event": "request"} | json.loads(about.as_json()))
            message = {"event": "log", "message": record.getMessage()}
            if record.exc_info:
                message["exception"] = self.formatException(record.exc_info)
            return json.dumps(when | message)
        if about is not None:
            record.msg, record.args = str(about), ()
        return super().format(record)
