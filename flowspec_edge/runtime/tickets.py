"""What whoever asks for a text holds while it is made; any thread may use it.

Knows nothing of how the text is made.
"""

from __future__ import annotations

import threading

from flowspec_edge.runtime.request import OnTokens, Request, Result


class Ticket:
    """A request that was handed in.

    ``on_tokens`` is called in the thread that drives the cluster, and should be quick: every other
    request waits for it.  If it raises, this request ends with that error, and no other.
    """

    def __init__(self, request: Request, on_tokens: OnTokens | None = None) -> None:
        self.request = request
        self.on_tokens = on_tokens
        self._settled = threading.Event()
        self._cancelled = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None

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
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def settle(self, outcome: Result | BaseException) -> None:
        """Only for who answers it: what came of it, once."""
        if isinstance(outcome, Result):
            self._result = outcome
        else:
            self._error = outcome
        self._settled.set()
