"""How models write tool calls: the formats that chat templates teach, and their grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec_edge.model.grammar import json_value


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    parameters  JSON schema of its arguments, which are an object
    strict      keywords of the schema that cannot be enforced are an error, instead of being ignored
    definition  as the chat template gets it
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    definition: dict[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """A call is ``open``, ``{"name": NAME, KEY: ARGUMENTS}``, ``close``.

    marker  a text that only templates with this format contain
    key     of the arguments
    open    a word that begins a call; empty: a call is the whole answer
    """

    marker: str
    key: str
    open: str = ""
    close: str = ""

    def grammar(self, tools: Sequence[Tool], special: Callable[[str], str | None], required: bool,
                several: bool, content: str | None) -> str:
        """Calls of ``tools``, in llguidance's Lark syntax.

        special   a word -> its form if it is one token that plain text cannot spell, else None
        required  the answer must be a call; otherwise it may be ``content``, a rule, or text if that is None
        several   further calls may follow the first
        """
        calls = "call" if not (several and self.open) else 'call ("\\n" call)*'
        opening, closing = (special(word) or json.dumps(word) for word in (self.open, self.close))
        names = " | ".join(f"{json.dumps(self._head(tool))} arguments_{i}" for i, tool in enumerate(tools))
        space = "\\n" if self.open else ""
        body = f'"{space}" ({names}) "}}{space}"' if space else f'({names}) "}}"'
        call = f"{opening} {body} {closing}" if self.open else body
        rules = [f"arguments_{i}: {json_value(tool.parameters, tool.strict)}" for i, tool in enumerate(tools)]
        if required:
            return "\n".join([f"start: {calls}", f"call: {call}", *rules])
        if content is not None:
            return "\n".join([f"start: {calls} | content", f"content: {content}", f"call: {call}", *rules])
        return "\n".join([*self._after_text(opening, closing, body, calls), f"call: {call}", *rules])

    def _after_text(self, opening: str, closing: str, body: str, calls: str) -> list[str]:
        """Rules for text that may end in calls."""
        if not self.open:
            return [f"start: TEXT? | {calls}", r"TEXT: /[^{](.|\n)*/"]
        if opening.startswith("<["):  # text cannot spell it
            number = opening[2:-2]
            return [f"start: free ({calls})?", f"free: (TEXT | <[^{number}]>)*", r"TEXT: /(.|\n)+/"]
        more = calls.removeprefix("call")
        return [f"start: TEXT | head {body} {closing} {more}", f"head[lazy]: TEXT {opening}",
                r"TEXT: /(.|\n)*/"]

    def _head(self, tool: Tool) -> str:
        return f'{{"name": {json.dumps(tool.name)}, "{self.key}": '


# Hermes' format, which Qwen2.5 and Qwen3 share, and that of Llama 3.1 and later.
_FORMATS = (ToolFormat("<tool_call>", "arguments", "<tool_call>", "</tool_call>"),
            ToolFormat('"parameters": dictionary of argument name', "parameters"))


def recognise_tool_format(template: str) -> ToolFormat | None:
    """The format that a Jinja chat template teaches; None: it has no tools, or an unknown format."""
    if "tools" not in template:
        return None
    return next((known for known in _FORMATS if known.marker in template), None)
