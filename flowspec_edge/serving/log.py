"""One line for every request: what it took and how it ended, never what was said.

Knows the fields and the two ways to write them.  Does not know where lines go.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

requests = logging.getLogger("flowspec_edge.serving.requests")

GONE = 499  # as proxies count a client that closed its connection


@dataclass
class Record:
    """A request; times are in seconds since it came, None if its turn, or its first token, never did."""

    path: str
    id: str | None = None
    status: int = 200
    finish: str | None = None
    strategy: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    seconds: float = 0.0
    error: str | None = None
    _start: float = field(default_factory=time.monotonic, repr=False)
    _gaps: list[float] = field(default_factory=list, repr=False)

    def came(self, tokens: Sequence[tuple[float, int]]) -> None:
        """When how many tokens came, in order; moments in seconds of time.monotonic()."""
        self._gaps.clear()
        for (before, _), (at, count) in pairwise([(0.0, 0), *tokens]):
            self._gaps += [at - before, *[0.0] * (count - 1)]
        if tokens:
            self.first_token_s = tokens[0][0] - self._start
            del self._gaps[0]

    @property
    def gaps(self) -> Sequence[float]:
        """Seconds between every token and the one before it; 0 for those that came together with it."""
        return self._gaps

    def write(self) -> None:
        """The request is over."""
        self.seconds = time.monotonic() - self._start
        requests.info("%s", self.path, extra={"record": self})

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps({name: round(value, 4) if isinstance(value, float) else value
                           for name, value in asdict(self).items() if not name.startswith("_")})

    def __str__(self) -> str:
        """The same for people."""
        queued = "" if self.queued_s is None else f", queued {self.queued_s:.2f} s"
        ended = self.error or self.finish or "client gone"
        tokens = f"{self.prompt_tokens} + {self.completion_tokens} tokens"
        took = f"{tokens} in {self.seconds:.2f} s{queued}"
        return f"{self.path} {self.status} {self.id or '-'}: {took}, {ended}"


class Lines(logging.Formatter):
    """Every log line with its time; as JSON objects if asked."""

    def __init__(self, as_json: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """A request's own fields, or the message of any other line."""
        about: Record | None = getattr(record, "record", None)
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
