"""One of an answer's choices, as its tokens arrive."""

from __future__ import annotations

from flowspec_edge.runtime.request import Request, Result
from flowspec_edge.serving.admission import Event, PendingRequest
from flowspec_edge.serving.openai.detokenize import CallPiece, ToolCallParser
from flowspec_edge.serving.openai.errors import api_error
from flowspec_edge.serving.openai.prepare import PreparedRequest
from flowspec_edge.serving.openai.responses import Finish, TokenDecoder, TokenLogprob


class Choice:
    """pending  its place in the queue or the cluster
    finish   None if it is incomplete
    result   None if it is incomplete, or a stop string ended it
    ids      its token ids, without those after a stop string
    """

    def __init__(self, index: int, request: Request, prepared: PreparedRequest, pending: PendingRequest
                 ) -> None:
        self.index, self.request, self.pending = index, request, pending
        self.finish: Finish | None = None
        self.result: Result | None = None
        self.ids: list[int] = []
        self._detokenizer = prepared.detokenizer(request)
        self._parser = ToolCallParser(prepared.calls) if prepared.calls else None
        self._token_decoder = TokenDecoder(prepared.decode)
        self._logprobs_sent = 0  # tokens whose log-probabilities were sent

    def read(self, event: Event) -> list[str | CallPiece]:
        """Return text and parts of tool calls that are certain now; ApiError if the request failed."""
        if isinstance(event, Exception):
            raise api_error(event)
        if isinstance(event, Result):
            assert event.finish_reason != "cancelled"  # nothing of such a request is delivered
            self.result = event
            self.finish = "stop" if self._detokenizer.stopped else event.finish_reason
            return self._parsed(self._detokenizer.close(), last=True)
        before = self.tokens
        text = self._detokenizer.push(event)
        self.ids += event[:self.tokens - before]
        if self._detokenizer.stopped:
            self.finish = "stop"
        return self._parsed(text, last=self._detokenizer.stopped)

    def _parsed(self, text: str, last: bool) -> list[str | CallPiece]:
        if self._parser is None:
            return [text] if text else []
        pieces = [*self._parser.push(text), *(self._parser.close() if last else ())]
        if self.finish == "stop" and self._parser.calls:
            self.finish = "tool_calls"
        return pieces

    @property
    def tokens(self) -> int:
        """How many tokens were read, up to the one that completed a stop string."""
        return self._detokenizer.tokens

    def new_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the tokens read since the last call, if requested."""
        new = self.pending.likelihoods[self._logprobs_sent:self.tokens]
        self._logprobs_sent += len(new)
        return self._token_decoder.decode(new)
