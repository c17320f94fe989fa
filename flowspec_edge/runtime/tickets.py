"""What whoever asks for a text holds while it is made; any thread may use it.

Knows nothing of how the text is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from flowspec_edge.runtime.request import Likelihood, OnTokens, Request, Result, Stats

Outcome = Result | BaseException


class Ticket:
    """A request that was handed in.

    ``on_tokens`` is called in the thread that drives the cluster, and should be quick: every other
    request waits for it.  If it raises, this request ends with that error, and no other.
    ``likelihoods`` has an entry for each token that it was called with, if the request wants them.
    """

    def __init__(self, request: Request, on_tokens: OnTokens | None = None) -> None:
        self.request = request
        self.on_tokens = on_tokens
        self.likelihoods: list[Likelihood] = []
        self._settled = threading.Event()
        self._cancelled = threading.Event()
        self._outcome: Outcome | None = None
        self._listeners: list[Callable[[Outcome], None]] = []
        self._lock = threading.Lock()  # between who settles and who begins to listen

    @property
    def done(self) -> bool:
        """Whether :meth:`result` returns, or raises, at once."""
        return self._settled.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the text any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Let the request end within a turn or two; its result has the tokens that there are by then."""
        self._cancelled.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is done, for at most ``timeout`` seconds; whether it is."""
        return self._settled.wait(timeout)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for what came of it; raises what the request ended with, TimeoutError if it goes on."""
        if not self.wait(timeout):
            raise TimeoutError(f"the request is not answered within {timeout:g} s")
        assert self._outcome is not None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def on_settled(self, listener: Callable[[Outcome], None]) -> None:
        """Call ``listener``, once, with what came of it: in the thread that drives the cluster, or here and
        now if it is done.  It should be as quick as ``on_tokens``, and must not raise."""
        with self._lock:
            if self._outcome is None:
                self._listeners.append(listener)
                return
        listener(self._outcome)

    def settle(self, outcome: Outcome) -> None:
        """Only for who answers it: what came of it, once."""
        with self._lock:
            self._outcome, listeners = outcome, self._listeners
        self._settled.set()
        for listener in listeners:
            listener(outcome)

    def give_up(self) -> None:
        """Only for who answers it: it was cancelled before it began."""
        nothing = Stats(turns=0.0, rounds=0, alt=0.0, alr=0.0, tokens_per_second=0.0, ttft_s=0.0,
                        itl_p50_s=0.0, itl_p95_s=0.0, drafted=0, verified=0, accepted=0, bytes=0,
                        decode_s=0.0, slot_s=0.0)
        self.settle(Result([], "cancelled", nothing))
