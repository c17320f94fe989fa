"""Converts a client's body to a request: tokens, limits and defaults."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowspec_edge.errors import UsageError
from flowspec_edge.model.chat import Message
from flowspec_edge.model.generation import choose_sampling
from flowspec_edge.model.modeldir import ModelDir
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.runtime.request import Request
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.serving.openai.detokenize import Detokenizer
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.schemas import Body, ChatBody, CompletionBody
from flowspec_edge.strategies.params import DEFAULT_STRATEGY, Params

_COMPLETION_TOKENS = 16  # OpenAI's default for max_tokens of a completion
_SEEDS = 2**63
_DRAWN_SEEDS = 2**53  # JavaScript reads them exactly: the seed is in the answer


@dataclass(frozen=True)
class PreparedRequest:
    request: Request
    detokenizer: Detokenizer
    decode: Callable[[Sequence[int]], str]
    details: bool = False  # whether the client asked for the token ids and the run's statistics


@dataclass(frozen=True)
class ServedModel:
    """name           clients' name of the model
    strategy       for requests that name none
    strategies     those that this cluster and model can run
    answer_tokens  the longest answer in a chat that sets no limit
    context        tokens of prompt and answer together; None: the model's own limit
    """

    model: ModelDir
    tokenizer: Tokenizer
    name: str
    strategy: str = DEFAULT_STRATEGY
    strategies: Sequence[str] = (DEFAULT_STRATEGY,)
    params: Params = field(default_factory=Params)
    answer_tokens: int = 1024
    context: int | None = None

    def probe(self) -> Request:
        return Request([0], self.strategy, 1, params=self.params)

    def chat(self, body: ChatBody) -> PreparedRequest:
        """ApiError for another model, or a chat that does not fit this one."""
        self.check_name(body.model)
        self._check_size(len(body.messages), "messages")
        self._check_size(sum(len(turn.content) for turn in body.messages), "characters",
                         self.tokenizer.longest_token)
        messages = [Message("system" if turn.role == "developer" else turn.role, turn.content)
                    for turn in body.messages]
        try:
            ids = self.tokenizer.chat(messages)
        except UsageError as error:
            # Written for the command line: clients know neither paths nor options.
            message = str(error).replace(str(self.model.path), f"the model {self.name}")
            message += " to the server" if message.endswith("Jinja template") else ""
            raise ApiError(400, message, "messages") from error
        stops = self.model.stop_ids | self.tokenizer.chat_stop_ids
        return self._prepared(body, ids, stops, (), self.answer_tokens)

    def completion(self, body: CompletionBody) -> PreparedRequest:
        """ApiError for another model, or an invalid prompt."""
        self.check_name(body.model)
        if isinstance(body.prompt, str):
            self._check_size(len(body.prompt), "characters", self.tokenizer.longest_token)
            try:
                ids = self.tokenizer.encode(body.prompt)
            except UsageError as error:
                raise ApiError(400, str(error), "prompt") from error
        else:
            ids = body.prompt
            self._check_size(len(ids), "tokens")
            vocabulary = int(self.model.config["vocab_size"])
            if not all(0 <= token < vocabulary for token in ids):
                raise ApiError(400, f"prompt: token ids go from 0 to {vocabulary - 1}", "prompt")
        return self._prepared(body, ids, self.model.stop_ids, ids, _COMPLETION_TOKENS)

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise ApiError(404, f"the model {name!r} does not exist here; there is {self.name!r}", "model",
                           "model_not_found")

    @property
    def _context_tokens(self) -> int:
        return min(self.context or self.model.max_positions, self.model.max_positions)

    def _check_size(self, count: int, unit: str, per_token: int = 1) -> None:
        """ApiError for a prompt that cannot fit whatever its tokens are: found before it costs time to count
        them. ``per_token``: units of a token, at most."""
        most = self._context_tokens * per_token
        if count > most:
            fits = f", which are at most {most} {unit}" if per_token > 1 else ""
            raise ApiError(400, f"the model's context is {self._context_tokens} tokens here{fits}; the "
                                f"prompt has {count} {unit}", code="context_length_exceeded")

    def _prepared(self, body: Body, ids: list[int], stop_ids: frozenset[int], after: Sequence[int],
               usual: int) -> PreparedRequest:
        strategy = body.flowspec.strategy or self.strategy
        if strategy not in self.strategies:
            raise ApiError(400, f"the strategy {strategy!r} does not run here; there are "
                                f"{', '.join(self.strategies)}", "flowspec.strategy")
        context = self._context_tokens
        room = context - len(ids)
        wanted = body.limit or min(usual, max(1, room))
        if wanted > room:
            message = (f"the model's context is {context} tokens here; the prompt has {len(ids)}, "
                       f"and {wanted} more are asked for")
            raise ApiError(400, message, code="context_length_exceeded")
        request = Request(ids, strategy, wanted, self.sampling(body), self.params, stop_ids,
                          body.likelihoods)
        decode = self.tokenizer.decode
        return PreparedRequest(request, Detokenizer(decode, body.stop, after), decode, body.flowspec.tokens)

    def sampling(self, body: Body) -> Sampling:
        """The client's settings, else the model's generation config, else greedy; seeds default to random."""
        given: dict[str, Any] = {name: value for name, value in (
            ("temperature", body.temperature), ("top_p", body.top_p),
            ("top_k", None if body.top_k is None else max(0, body.top_k))) if value is not None}
        seed = secrets.randbelow(_DRAWN_SEEDS) if body.seed is None else body.seed % _SEEDS
        try:
            return choose_sampling(Sampling(**given, seed=seed), given, self.model)[0]
        except UsageError as error:
            raise ApiError(400, str(error), "temperature" if "temperature" in str(error) else None) from error
