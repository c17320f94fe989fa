"""Chat messages, and the formats of chats, tool calls and reasoning.

There are chat formats for models whose tokenizers have none (Llama-2-chat, Vicuna, base models), and the formats of
tool calls that chat templates teach, with their grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from flowspec_edge.errors import UsageError
from flowspec_edge.model.grammar import json_value
from flowspec_edge.model.opened import ANSWERING, OpenModel
from flowspec_edge.model.weights.located import MANIFEST
from flowspec_edge.util.bounded_read import read_json, read_json_object, read_text


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
        """Write the grammar of calls of ``tools``, in llguidance's Lark syntax.

        special   a word -> its form if it is one token that plain text cannot spell, else None
        required  the answer must be a call; otherwise it may be ``content``, a rule, or text if that is None
        several   further calls may follow the first
        """
        calls = "call" if not (several and self.open) else 'call ("\\n" call)*'
        opening, closing = (special(marker) or json.dumps(marker) for marker in (self.open, self.close))
        names = " | ".join(f"{json.dumps(self._head(tool))} arguments_{i}" for i, tool in enumerate(tools))
        space = "\\n" if self.open else ""
        body = f'"{space}" ({names}) "}}{space}"' if space else f'({names}) "}}"'
        call = f"{opening} {body} {closing}" if self.open else body
        rules = [f"arguments_{i}: {json_value(tool.parameters, tool.strict, f'{tool.name}: parameters')}"
                 for i, tool in enumerate(tools)]
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
    """Return the format that a Jinja chat template teaches; None: it has no tools, or an unknown format."""
    if "tools" not in template:
        return None
    return next((tool_format for tool_format in _FORMATS if tool_format.marker in template), None)


@dataclass(frozen=True)
class ReasoningFormat:
    """How an answer has its reasoning: between the words ``open`` and ``close``, before the content.

    Or, with ``channels``, in messages of the channel analysis, as gpt-oss has it.
    """

    open: str = ""
    close: str = ""
    channels: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """Tokens without which a text cannot be split."""
        return (_CHANNEL, "<|message|>") if self.channels else (self.open, self.close)


# That of DeepSeek-R1, which Qwen3 and most others share, and Magistral's.
_THOUGHTS = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))


def recognise_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the format of the reasoning in answers by a Jinja chat template; None: it has none, or an unknown one."""
    if _CHANNEL in template:
        return ReasoningFormat(channels=True)
    return next((reasoning_format for reasoning_format in _THOUGHTS if reasoning_format.open in template), None)


_MAX_TEMPLATE = 1024 * 1024  # bytes
# Besides tokenizer_config.json.
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")

Role = Literal["system", "user", "assistant", "tool"]

# Vicuna's since v1.1; Llama-2-chat was also trained without a system message.
VICUNA_SYSTEM = ("A chat between a curious user and an artificial intelligence assistant. "
                 "The assistant gives helpful, detailed, and polite answers to the user's questions.")

# End-of-turn tokens of tokenizers' templates, which generation_config.json may not list.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "</s>")
_CHANNEL = "<|channel|>"  # in gpt-oss's format (harmony) a turn has several messages, each with an <|end|>


def turn_ends(template: str) -> tuple[str, ...]:
    """Return the tokens that may end an answer by a Jinja chat template."""
    return tuple(end for end in _TURN_ENDS
                 if end in template and not (end == "<|end|>" and _CHANNEL in template))


_ENDS = {"{%": "%}", "{{": "}}", "{#": "#}"}  # of Jinja's tags
_JINJA_TAG = re.compile("|".join(map(re.escape, _ENDS)))
_STRING = re.compile(r"""'(?:\\.|[^'\\])*'?|"(?:\\.|[^"\\])*"?""", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")  # no attribute's


def variables_of(template: str) -> frozenset[str]:
    """Return the names in a Jinja template's code: not in its text, strings and comments, and of no attributes.

    It is not compiled, since that takes a process with limits.
    """
    names, at = set[str](), 0
    while tag := _JINJA_TAG.search(template, at):
        end = template.find(_ENDS[tag[0]], tag.end())
        if end < 0:
            break
        if tag[0] != "{#":
            names |= {*_NAME.findall(_STRING.sub(" ", template[tag.end():end]))}
        at = end + 2
    return frozenset(names)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; ``arguments``: an object, or the text of one that was cut off."""

    id: str
    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True)
class Message:
    """A message of a chat.

    calls      an assistant's
    call_id    the call that a tool's message answers
    name       the writer's
    reasoning  an assistant's, before its content
    """

    role: Role
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise UsageError(f"no role {self.role!r}; there are {', '.join(get_args(Role))}")

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates of transformers' tokenizers read it."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            turn["tool_calls"] = [{"id": call.id, "type": "function",
                                   "function": {"name": call.name, "arguments": call.arguments}}
                                  for call in self.calls]
        more = {"tool_call_id": self.call_id, "name": self.name, "reasoning_content": self.reasoning}
        return turn | {key: value for key, value in more.items() if value is not None}


@dataclass(frozen=True)
class Rendering:
    """How a chat becomes a prompt.

    values     further variables of a Jinja template, such as enable_thinking
    opens      the prompt ends where an answer begins (transformers: add_generation_prompt)
    continues  the prompt ends within the last message, which the answer continues; then it does not open one
    special    the tokenizer's special tokens are added to those of the template
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    opens: bool = True
    continues: bool = False
    special: bool = False


# What a prompt is made of whatever a client's values are.
_FIXED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
          "tokenize", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token",
          "mask_token",
          "additional_special_tokens")


def check_values(values: Mapping[str, Any], fixed: Sequence[str] = _FIXED) -> None:
    """Raise UsageError for a variable of the template that is not the user's."""
    if reserved := next((name for name in values if name in fixed), None):
        raise UsageError(f"{reserved} cannot be set so: it is made from the request")


@dataclass(frozen=True)
class PromptPiece:
    """A text that is encoded on its own, as in training: ``add_bos`` and ``add_eos`` add BOS and EOS."""

    text: str
    add_bos: bool
    add_eos: bool


def llama_2(messages: Sequence[Message]) -> list[PromptPiece]:
    """Each exchange is a sequence of its own, with the system message inside the first."""
    system, turns = _split(messages)
    prefix = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system is not None else ""
    pieces = []
    for i, (user, assistant) in enumerate(turns):
        question = f"[INST] {((prefix if i == 0 else '') + user).strip()} [/INST]"
        answer = "" if assistant is None else f" {assistant.strip()} "
        pieces.append(PromptPiece(question + answer, add_bos=True, add_eos=assistant is not None))
    return pieces


def vicuna(messages: Sequence[Message]) -> list[PromptPiece]:
    """Vicuna from v1.1 on: one sequence, with EOS after each answer."""
    system, turns = _split(messages)
    pieces = []
    for i, (user, assistant) in enumerate(turns):
        opening = f"{VICUNA_SYSTEM if system is None else system} " if i == 0 else ""
        answer = "" if assistant is None else f" {assistant}"
        text = f"{opening}USER: {user} ASSISTANT:{answer}"
        pieces.append(PromptPiece(text, add_bos=i == 0, add_eos=assistant is not None))
    return pieces


def bare(messages: Sequence[Message]) -> list[PromptPiece]:
    """Return the texts alone, a line break between two: a model that was not trained to chat continues the last."""
    return [PromptPiece("\n".join(message.content for message in messages), add_bos=True, add_eos=False)]


def continued(pieces: Sequence[PromptPiece], answer: str, joint: str) -> list[PromptPiece]:
    """Return a prompt in a built-in format whose answer has begun."""
    last = pieces[-1]
    text = f"{last.text}{joint}{answer.lstrip() if joint == ' ' else answer}"
    return [*pieces[:-1], PromptPiece(text, last.add_bos, add_eos=False)]


BUILT_IN: dict[str, Callable[[Sequence[Message]], list[PromptPiece]]] = {
    "llama-2": llama_2, "vicuna": vicuna, "bare": bare}
_NAME_PATTERNS = {"llama-2": re.compile(r"llama[-_ ]?2.*chat"), "vicuna": re.compile(r"vicuna")}


def recognise(model: OpenModel) -> str | None:
    """Return the built-in format for the model's name; None if none matches."""
    from flowspec_edge.model.catalogue import find_known_model  # pydantic takes a while

    for name in _names(model):
        if (entry := find_known_model(name)) and entry[1].chat_template:
            return entry[1].chat_template
        for kind, pattern in _NAME_PATTERNS.items():
            if pattern.search(name.lower()):
                return kind
    return None


def require_template(model: OpenModel, template: str | None) -> None:
    """Raise UsageError for a missing file ``template``, or a model without a template; needs no transformers."""
    if template is not None:
        if template not in BUILT_IN:
            read_template(Path(template))
    elif not has_template(model):
        raise no_template(model)


def has_template(model: OpenModel) -> bool:
    """Return whether the model's tokenizer has a chat template, or a built-in one belongs to its name."""
    return _has_own_template(model) or recognise(model) is not None


def no_template(model: OpenModel) -> UsageError:
    return UsageError(f"{model.display_path} has no chat template, and its name matches no built-in one: take a model "
                      f"that has one, such as --model {ANSWERING}, or give --chat-template {', '.join(BUILT_IN)} or a "
                      "file with a Jinja template")


def _has_own_template(model: OpenModel) -> bool:
    """Whether the tokenizer may have one; its loader decides where its files cannot be read."""
    if any((model.target / name).exists() for name in _TEMPLATE_FILES):
        return True
    path = model.target / "tokenizer_config.json"
    try:
        return path.is_file() and bool(read_json_object(path).get("chat_template"))
    except UsageError:
        return True


def read_template(path: Path) -> str:
    try:
        return read_text(path, _MAX_TEMPLATE)
    except UsageError as error:
        raise UsageError(f"no chat template {str(path)!r}: neither {', '.join(BUILT_IN)} nor a file that can "
                         f"be read ({error})") from error


def _split(messages: Sequence[Message]) -> tuple[str | None, list[tuple[str, str | None]]]:
    system = messages[0].content if messages and messages[0].role == "system" else None
    turns = messages[1:] if system is not None else messages
    for i, message in enumerate(turns):
        if message.role != ("user", "assistant")[i % 2]:
            raise UsageError("a chat is at most one system message, then user and assistant in turn: "
                             f"message {i + 1 + (system is not None)} is the {message.role}'s")
    if len(turns) % 2 == 0:
        raise UsageError("a chat must end with a user message")
    answers = [message.content for message in turns[1::2]]
    return system, list(zip([message.content for message in turns[::2]], [*answers, None], strict=True))


def _names(model: OpenModel) -> list[str]:
    names = [model.name]
    origins = ((model.target / "config.json", ("_name_or_path",)),
               (model.target / "tokenizer_config.json", ("name_or_path",)),
               (model.path / MANIFEST, ("source", "name")))
    for path, keys in origins:
        try:
            value = read_json(path)
            for key in keys:
                value = value[key]
        except (UsageError, KeyError, TypeError):
            continue  # only a hint here: a reader that needs the file reports the error
        names.append(str(value))
    return names
