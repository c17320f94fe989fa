"""Converts a client's body to requests: tokens, limits, defaults, grammars."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flowspec_edge.d0.request import Request
from flowspec_edge.errors import UsageError
from flowspec_edge.model.chat import (
    Message,
    ReasoningFormat,
    Rendering,
    Tool,
    ToolCall,
    ToolFormat,
    check_values,
)
from flowspec_edge.model.grammar import GrammarText
from flowspec_edge.model.opened import OpenModel, choose_sampling
from flowspec_edge.model.text import THINKING, Tokenizer
from flowspec_edge.sampling.settings import Penalties, Restrictions, Sampling
from flowspec_edge.serving.openai.answer_formats import select_answer_format
from flowspec_edge.serving.openai.detokenize import Detokenizer
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.reasoning import ReasoningParser, reasoning_parser
from flowspec_edge.serving.openai.schemas import (
    Body,
    ChatBody,
    ChatMessage,
    CompletionBody,
    NamedTool,
    ToolDefinition,
)
from flowspec_edge.strategies.params import DEFAULT_STRATEGY, Params

_COMPLETION_TOKENS = 16  # OpenAI's default for max_tokens of a completion
_SEEDS = 2**63
_DRAWN_SEEDS = 2**53  # JavaScript reads them exactly: the seed is in the answer


_OPENING = 16  # tokens of a prompt's end, more than its last word has
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class PreparedRequest:
    """A request's body, checked and tokenized.

    prompts    a request for each, with the first choice's seed
    n          how many answers to each prompt the client wants
    stops      stop strings
    continues  whether an answer continues its prompt's text; not in a chat
    keeps_stop  whether the text has the stop string
    shown_ends  tokens whose text the answer has if they end it
    least      tokens before which no stop string counts
    details    whether the client asked for the token ids and the run's statistics
    calls      how tool calls are written, if the answer may have some
    reasoning  how reasoning is written, if the answer may have some and has it apart
    thinks     whether the prompt has begun the reasoning
    silent     whether the client wants no reasoning
    grammar    that every answer must match, and the field that asks for it
    ignored    names of the body's fields that have no effect here
    """

    prompts: Sequence[Request]
    decode: Callable[[Sequence[int]], str]
    n: int = 1
    stops: Sequence[str] = ()
    keeps_stop: bool = False
    least: int = 0
    shown_ends: frozenset[int] = frozenset()
    continues: bool = False
    details: bool = False
    calls: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    thinks: bool = False
    silent: bool = False
    grammar: tuple[GrammarText, str] | None = None
    ignored: Sequence[str] = ()

    @property
    def request(self) -> Request:
        """Return the first choice's request."""
        return self.prompts[0]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.prompts)

    def detokenizer(self, request: Request) -> Detokenizer:
        return Detokenizer(self.decode, self.stops, request.prompt if self.continues else (), self.keeps_stop,
                           self.least)

    def reasoning_parser(self) -> ReasoningParser | None:
        """Return the parser; None if the answer has no reasoning apart."""
        if self.reasoning is None:
            return None
        return reasoning_parser(self.reasoning, self.thinks, self.calls.open if self.calls else "")

    def choices(self) -> list[Request]:
        """Return a request for each choice; one prompt's choices stand together.

        The seeds of each prompt's choices begin with the first choice's, so that an answer does not depend on the
        other prompts.
        """
        seed = self.request.sampling.seed
        return [replace(request, sampling=replace(request.sampling, seed=(seed + i) % _SEEDS))
                for request in self.prompts for i in range(self.n)]


@dataclass(frozen=True)
class ServedModel:
    """What the server knows of its model.

    name           clients' name of the model
    strategy       for requests that name none
    strategies     those that this cluster and model can run
    answer_tokens  the longest answer in a chat that sets no limit
    context        tokens of prompt and answer together; None: the model's own limit
    """

    model: OpenModel
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
        """Raise ApiError for another model, or a chat that does not fit this one."""
        self.check_name(body.model)
        self._check_size(len(body.turns), "messages")
        calling = body.tools and body.tool_choice != "none"
        tools = [_tool(definition) for definition in body.tools or ()] if calling else []
        self._check_size(_characters(body.turns, tools), "characters", self.tokenizer.longest_token)
        form = self.tokenizer.tool_format
        rendering, ignored = self._rendering(body)
        if tools and form is None:
            raise ApiError(400, "the model's chat template has no tools, or in a format that is not known "
                                'here: leave tools out, or send "tool_choice": "none"', "tools")
        try:
            ids = self.tokenizer.chat([_message(turn) for turn in body.turns], tools, rendering)
        except UsageError as error:
            # Written for the command line: clients know neither paths nor options.
            message = str(error).replace(str(self.model.display_path), f"the model {self.name}")
            message += " to the server" if message.endswith("Jinja template") else ""
            raise ApiError(400, message, body.messages_name) from error
        stops = self.model.stop_ids | self.tokenizer.chat_stop_ids
        grammar = self._tool_grammar(body, form, tools) if tools and form else None
        prepared = self._prepared(body, [ids], stops, self.answer_tokens, grammar)
        prepared = replace(prepared, continues=rendering.continues, ignored=[*prepared.ignored, *ignored])
        if tools and form is not None:
            prepared = replace(prepared, calls=form, decode=partial(self.tokenizer.decode, special=True))
        return self._with_reasoning(body, prepared)

    def _with_reasoning(self, body: ChatBody, prepared: PreparedRequest) -> PreparedRequest:
        """Return a grammar that fixes how the answer begins leaves no room for reasoning."""
        form = self.tokenizer.reasoning_format
        must_call = bool(prepared.calls) and body.tool_choice not in (None, "auto")
        if form is None or not body.splits_reasoning or must_call or select_answer_format(body) is not None:
            return prepared
        if self.tokenizer.hides(form.words):
            prepared = replace(prepared, decode=partial(self.tokenizer.decode, special=True))
        if prepared.continues:
            prefix = body.turns[-1].content
            thinks = prefix.rfind(form.open) > prefix.rfind(form.close)
        else:
            end = self.tokenizer.decode(prepared.request.prompt[-_OPENING:], special=True)
            thinks = end.rstrip().endswith(form.open)
        return replace(prepared, reasoning=form, thinks=thinks and not form.channels,
                       silent=body.include_reasoning is False)

    def _rendering(self, body: ChatBody) -> tuple[Rendering, list[str]]:
        """How the chat becomes a prompt, and the names of the template's variables that it does not have."""
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise ApiError(400, "continue_final_message: the prompt cannot open another answer, too: leave "
                                "out add_generation_prompt", "continue_final_message")
        values: dict[str, Any] = {**(body.chat_template_kwargs or {})}
        if body.enable_thinking is not None:
            values.setdefault("enable_thinking", body.enable_thinking)
        if body.documents:
            self._require_variable("documents", "documents")
            values["documents"] = body.documents
        if body.effort is not None:
            field = "reasoning_effort" if body.reasoning_effort else "reasoning.effort"
            values = self._with_effort(body.effort, values, field)
        unknown_values = [name for name in values if not self.tokenizer.reads(name)]
        if self.tokenizer.always_thinks and any(values.get(name) is False for name in THINKING):
            param = "chat_template_kwargs" if body.enable_thinking is None else "enable_thinking"
            raise ApiError(400, f"{param}: the model's chat template always lets it think", param)
        try:
            check_values(values)
        except UsageError as error:
            raise ApiError(400, f"chat_template_kwargs: {error}", "chat_template_kwargs") from error
        opens = body.add_generation_prompt is not False and not continues
        known_fields = {name: value for name, value in values.items() if name not in unknown_values}
        return (Rendering(known_fields, opens, continues, bool(body.add_special_tokens)),
                [f"chat_template_kwargs.{name}" for name in unknown_values])

    def _with_effort(self, effort: str, values: dict[str, Any], field: str) -> dict[str, Any]:
        """Return a reasoning effort as the template's variables: its own, and whether to think at all."""
        switches = {name: effort != "none" for name in THINKING if self.tokenizer.reads(name)}
        levels = {"reasoning_effort": effort} if self.tokenizer.reads("reasoning_effort") else {}
        if not switches and not levels and (effort != "none" or self.tokenizer.always_thinks):
            raise ApiError(400, f"{field}: the model's chat template has neither reasoning_effort nor "
                                "enable_thinking, so the effort cannot be changed: leave it out", field)
        return {**switches, **levels, **values}

    def _require_variable(self, name: str, field: str) -> None:
        if not self.tokenizer.reads(name):
            raise ApiError(400, f"{field}: the model's chat template does not read {name}: put it into the "
                                "messages", field)

    def prepared(self, body: Body) -> PreparedRequest:
        """Prepare a chat or a completion, as :meth:`chat` or :meth:`completion`."""
        if isinstance(body, ChatBody):
            return self.chat(body)
        assert isinstance(body, CompletionBody)
        return self.completion(body)

    def completion(self, body: CompletionBody) -> PreparedRequest:
        """Raise ApiError for another model, or an invalid prompt."""
        self.check_name(body.model)
        special = body.add_special_tokens is not False
        prompts = [self._ids(prompt, special) for prompt in body.prompt]
        usual = _COMPLETION_TOKENS if body.short else self.answer_tokens
        return replace(self._prepared(body, prompts, self.model.stop_ids, usual), continues=True)

    def _ids(self, prompt: str | list[int], special: bool) -> list[int]:
        if isinstance(prompt, str):
            self._check_size(len(prompt), "characters", self.tokenizer.longest_token)
            try:
                return self.tokenizer.encode(prompt, special)
            except UsageError as error:
                raise ApiError(400, str(error), "prompt") from error
        self._check_size(len(prompt), "tokens")
        self._check_ids(prompt, "prompt")
        return prompt

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        vocabulary = int(self.model.config["vocab_size"])
        if not all(0 <= token < vocabulary for token in ids):
            raise ApiError(400, f"{param}: token ids go from 0 to {vocabulary - 1}", param)

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise ApiError(404, f"the model {name!r} does not exist here; there is {self.name!r}", "model",
                           "model_not_found")

    @property
    def context_tokens(self) -> int:
        return min(self.context or self.model.max_positions, self.model.max_positions)

    def _check_size(self, count: int, unit: str, per_token: int = 1) -> None:
        """Raise ApiError for a prompt that is too long whatever its tokens are, before time is spent on counting them.

        ``per_token``: units of a token, at most.
        """
        most = self.context_tokens * per_token
        if count > most:
            fits = f", which are at most {most} {unit}" if per_token > 1 else ""
            raise ApiError(400, f"the model's context is {self.context_tokens} tokens here{fits}; the "
                                f"prompt has {count} {unit}", code="context_length_exceeded")

    def is_quick(self, prepared: PreparedRequest) -> bool:
        """Whether :meth:`compiled` is known to take hardly any time."""
        return prepared.grammar is None or self.tokenizer.grammars.is_quick(prepared.grammar[0])

    def compiled(self, prepared: PreparedRequest) -> PreparedRequest:
        """Compile the request's grammar; ApiError, which names the field, if it cannot be used."""
        if prepared.grammar is None:
            return prepared
        text, param = prepared.grammar
        with _grammar_errors(param):
            grammar = self.tokenizer.grammars.compile(text, prepared.request.stop_ids)
        return replace(prepared, prompts=[replace(request, grammar=grammar) for request in prepared.prompts])

    def _tool_grammar(self, body: ChatBody, form: ToolFormat, tools: Sequence[Tool]
                      ) -> tuple[GrammarText, str]:
        choice = body.tool_choice
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.name == choice.function.name]
        required = isinstance(choice, NamedTool) or choice == "required"
        answer = select_answer_format(body)
        if answer is not None and answer.written:
            raise ApiError(400, f"{answer.field}: a grammar and tools exclude each other: leave one out",
                           answer.field)
        several = body.parallel_tool_calls is not False
        with _grammar_errors("tools"):
            content = None if answer is None else answer.rule
            return self.tokenizer.grammars.text(
                lambda special: form.grammar(tools, special, required, several, content)), "tools"

    def _answer_grammar(self, body: Body) -> tuple[GrammarText, str] | None:
        answer = select_answer_format(body)
        if answer is None:
            return None
        with _grammar_errors(answer.field):
            grammars = self.tokenizer.grammars
            text = (grammars.written(answer.rule) if answer.written else
                    grammars.text(lambda _: f"start: {answer.rule}"))
            return text, answer.field

    def _prepared(self, body: Body, prompts: Sequence[list[int]], stop_ids: frozenset[int], usual: int,
                  grammar: tuple[GrammarText, str] | None = None) -> PreparedRequest:
        strategy = self._strategy(body)
        sampling, penalties = self.sampling(body), self._penalties(body)
        restrictions = self._restrictions(body)
        self._check_ids(body.stop_token_ids or (), "stop_token_ids")
        ends = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else stop_ids)
        grammar = grammar or self._answer_grammar(body)
        if body.ignore_eos and grammar is not None:
            raise ApiError(400, f"ignore_eos: {grammar[1]} ends the answer: leave one out", "ignore_eos")
        requests = [Request(ids, strategy, self._limit(body, len(ids), usual), sampling, self.params,
                            ends, body.likelihoods, penalties=penalties, restrictions=restrictions,
                            priority=body.priority or 0)
                    for ids in prompts]
        decode = (partial(self.tokenizer.decode, special=True) if body.skip_special_tokens is False
                  else self.tokenizer.decode)
        return PreparedRequest(requests, decode, body.n or 1, body.stop, body.keeps_stop,
                               body.min_tokens or 0,
                               frozenset(body.stop_token_ids or ()) if body.keeps_stop else frozenset(),
                               details=body.flowspec.tokens, grammar=grammar,
                               ignored=body.ignored)

    def _strategy(self, body: Body) -> str:
        extension, beside = body.flowspec.strategy, body.strategy
        field = "flowspec.strategy" if extension is not None else "strategy"
        if extension is not None and beside is not None and extension != beside:
            raise ApiError(400, f"strategy: {beside!r} is not flowspec.strategy, {extension!r}: leave one out",
                           "strategy")
        strategy = extension or beside or self.strategy
        if strategy not in self.strategies:
            raise ApiError(400, f"the strategy {strategy!r} does not run here; there are "
                                f"{', '.join(self.strategies)}", field)
        return strategy

    def _limit(self, body: Body, prompt: int, usual: int) -> int:
        """Return the longest answer to a prompt of so many tokens."""
        context = self.context_tokens
        room = context - prompt
        requested = body.limit or min(usual, max(1, room))
        if body.cut_to_room:
            requested = min(requested, max(1, room))
        if requested > room:
            message = (f"the model's context is {context} tokens here; the prompt has {prompt}, "
                       f"and {requested} more are asked for")
            raise ApiError(400, message, code="context_length_exceeded")
        if (body.min_tokens or 0) > requested:
            raise ApiError(400, f"min_tokens: {body.min_tokens} are more than the answer may have, {requested}",
                           "min_tokens")
        return requested

    def _penalties(self, body: Body) -> Penalties | None:
        self._check_ids(body.logit_bias or (), "logit_bias")
        repetition = 1.0 if body.repetition_penalty is None else body.repetition_penalty
        return Penalties(body.frequency_penalty or 0.0, body.presence_penalty or 0.0,
                         body.logit_bias or {}, repetition) or None

    def _restrictions(self, body: Body) -> Restrictions | None:
        if body.allowed_token_ids is not None and not body.allowed_token_ids:
            raise ApiError(400, "allowed_token_ids: give at least one token id, or leave it out",
                           "allowed_token_ids")
        self._check_ids(body.allowed_token_ids or (), "allowed_token_ids")
        vocabulary = int(self.model.config["vocab_size"])  # which the model never leaves
        words = tuple(ids for word in body.bad_words or () for ids in self.tokenizer.words(word)
                      if max(ids) < vocabulary)
        allowed = None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids)
        return Restrictions(allowed, words, body.min_tokens or 0) or None

    def sampling(self, body: Body) -> Sampling:
        """Return the sampling settings of a request.

        They are the client's, else those of the model's generation config, else greedy.  If the client gives no seed,
        the seed is random.
        """
        settings: dict[str, Any] = {name: value for name, value in (
            ("temperature", body.temperature), ("top_p", body.top_p), ("min_p", body.min_p),
            ("top_k", None if body.top_k is None else max(0, body.top_k))) if value is not None}
        seed = secrets.randbelow(_DRAWN_SEEDS) if body.seed is None else body.seed % _SEEDS
        try:
            return choose_sampling(Sampling(**settings, seed=seed), settings, self.model)[0]
        except UsageError as error:
            raise ApiError(400, str(error), "temperature" if "temperature" in str(error) else None) from error


def _message(turn: ChatMessage) -> Message:
    calls = tuple(ToolCall(call.id or "", call.function.name, call.function.parsed)
                  for call in turn.tool_calls or ())
    role = "system" if turn.role == "developer" else turn.role
    return Message(role, turn.content, calls, turn.tool_call_id, turn.name,
                   turn.reasoning_content or turn.reasoning)


def _tool(definition: ToolDefinition) -> Tool:
    function = definition.function
    return Tool(function.name, {**(function.parameters or _NO_PARAMETERS), "type": "object"},
                bool(function.strict), definition.model_dump(exclude_none=True))


def _characters(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> int:
    """Return a lower bound of the prompt's characters."""
    calls = [call.function.arguments for turn in messages for call in turn.tool_calls or ()]
    return sum(len(turn.content) for turn in messages) + sum(map(len, calls)) + sum(
        len(tool.name) for tool in tools)


@contextmanager
def _grammar_errors(param: str) -> Iterator[None]:
    """ApiError, which names the field, if a grammar cannot be used."""
    try:
        yield
    except UsageError as error:
        raise ApiError(400, f"{param}: {error}", param) from error
    except RecursionError as error:
        raise ApiError(400, f"{param}: nested too deeply", param) from error
