"""What becomes of the fields of a request, and the tables that say so.

A field is implemented, refused because ignoring it would change the answer, or accepted without effect
because the answer is the same without it. Values that ask for nothing are always accepted. A name that is in
no table is an error if it looks like a misspelt one; otherwise it has no effect, and the answer says so.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flowspec_edge.serving.openai.errors import ApiError

Endpoint = Literal["chat", "completions", "responses", "api/chat", "api/generate", "options", "messages",
                   "count_tokens"]
Verdict = Literal["implemented", "refused", "no effect"]
Source = Literal["OpenAI", "vLLM", "SGLang", "llama.cpp", "others", "Ollama", "Anthropic"]

_SIMILAR = 0.85  # difflib's ratio, from which a name is taken for a misspelt one
_GOES_WITH = re.compile(r"it goes with (\w+)(?:, which is refused)?")
_MOST_NAMES, _MAX_NAME = 8, 40  # ignored names that an answer tells, and their characters
_PATHS: dict[Endpoint, str] = {
    "chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses",
    "api/chat": "/api/chat", "api/generate": "/api/generate", "options": "/api", "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens"}


@dataclass(frozen=True)
class RequestField:
    """A field of a request's body, and what it gets.

    sources      who documents it
    implemented  the endpoints that do what it asks for
    elsewhere    what it gets at the others
    explanation  what it does here; or why it does nothing, and what to use instead
    example      a value that asks for something
    neutral      values that ask for nothing, besides null
    """

    name: str
    sources: tuple[Source, ...]
    implemented: tuple[Endpoint, ...]
    elsewhere: Verdict
    explanation: str
    example: Any
    neutral: tuple[Any, ...] = ()

    def verdict(self, endpoint: Endpoint) -> Verdict:
        return "implemented" if endpoint in self.implemented else self.elsewhere

    def check(self, endpoint: Endpoint, value: Any, parent: str = "") -> None:
        """Raise ApiError if the endpoint cannot do what ``value`` asks for. ``parent``: put before the name."""
        if self.verdict(endpoint) != "refused" or value is None or any(
                value == other and isinstance(value, bool) == isinstance(other, bool)
                for other in self.neutral):
            return
        advice = f", or send {json.dumps(self.neutral[0])}" if self.neutral else ""
        refuser = _PATHS[endpoint] if self.implemented else "this server"
        name = parent + self.name
        raise ApiError(400, f"{name} is not supported by {refuser} ({self.explanation}): leave it out{advice}", name,
                       "unsupported_parameter")


class FieldTable:
    """The fields of one or more endpoints, by name."""

    def __init__(self, fields: Sequence[RequestField], endpoints: int, parent: str = "") -> None:
        """Index the fields by name.

        ``endpoints``: how many it is of; ``parent``: the field that has these, for errors.
        """
        self.fields = {field.name: field for field in fields}
        self._endpoints, self._parent = endpoints, f"{parent}." if parent else ""

    def ignored(self, endpoint: Endpoint, body: dict[str, Any]) -> tuple[str, ...]:
        """Check every field of a body; return the undocumented names, which have no effect.

        ApiError for a field that would change the answer, or that looks like a misspelt one.
        """
        unknown = []
        for name, value in body.items():
            if field := self.fields.get(name):
                field.check(endpoint, value, self._parent)
            elif name.startswith("speculative."):  # llama.cpp's
                continue
            elif suggestion := self._similar_field(name, endpoint):
                raise ApiError(400, f"{self._parent}{name} is no field of a request: did you mean {suggestion}?",
                               self._parent + name, "unknown_parameter")
            else:
                unknown.append(self._parent + name)
        return tuple(unknown)

    def rows(self) -> Iterator[str]:
        """Yield the lists of docs/reference/fields.md, one for each verdict.

        Fields of which the same is said share a line.
        """
        for verdict in get_args(Verdict):
            names_by_text: dict[str, list[str]] = {}
            for field in sorted(self.fields.values(), key=lambda field: field.name):
                if verdict == ("implemented" if field.implemented else field.elsewhere):
                    names_by_text.setdefault(self._described(field, verdict), []).append(f"`{field.name}`")
            if names_by_text:
                yield from (f"{verdict.capitalize()}:", "")
                yield from (f"- {', '.join(names)}: {text}" for text, names in names_by_text.items())
                yield ""

    def _described(self, field: RequestField, verdict: Verdict) -> str:
        """Say what becomes of a field. Without effect it is said only where the user has another way to the effect."""
        names_alternative = re.search(r"\bsee\b|\buse\b|--|^it goes with|usage|refused", field.explanation)
        if verdict == "no effect" and not names_alternative:
            return "the answer is the same"
        everywhere = len(field.implemented) in (0, self._endpoints)
        endpoints = "" if everywhere else f"({', '.join(field.implemented)}) "
        if goes := _GOES_WITH.fullmatch(field.explanation):
            return f"goes with {goes[1]}"
        return endpoints + field.explanation

    def _similar_field(self, name: str, endpoint: Endpoint) -> str | None:
        """Return the field of the endpoint that ``name`` looks like: maxTokens, temprature."""
        names = {_letters(field.name): field.name for field in self.fields.values()
                 if endpoint in field.implemented}
        close = difflib.get_close_matches(_letters(name[:_MAX_NAME]), names, 1, _SIMILAR)
        return names[close[0]] if close else None


def printable_names(names: Iterable[str]) -> list[str]:
    """List ignored names for an answer: printable ASCII, and not too many."""
    printable = [re.sub(r"[^ -+\--~]", "?", name[:_MAX_NAME]) for name in names]
    return printable[:_MOST_NAMES] + (["…and more"] if len(printable) > _MOST_NAMES else [])


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
