"""Chats: messages, and how a model that was trained on chats wants them written.

Knows the two formats from before tokenizers had templates, Llama-2-chat's and Vicuna's, and which
models speak them.  Does not know tokens; ``text.Tokenizer.chat`` turns a chat into these, and uses the
tokenizer's own template where there is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import MANIFEST, ModelDir

Role = Literal["system", "user", "assistant"]

# Vicuna's own, since v1.1; Llama-2-chat was trained without one as well.
VICUNA_SYSTEM = ("A chat between a curious user and an artificial intelligence assistant. "
                 "The assistant gives helpful, detailed, and polite answers to the user's questions.")

# What ends an answer in the templates that tokenizers bring, whether or not the generation
# configuration says so.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "</s>")


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise UsageError(f"no role {self.role!r}; there are {', '.join(get_args(Role))}")


@dataclass(frozen=True)
class Piece:
    """A text that is encoded on its own, as the models' trainers did, between special tokens.

    begins  the beginning-of-sequence token comes before it
    ends    the end-of-sequence token comes after it
    """

    text: str
    begins: bool
    ends: bool


def llama_2(messages: Sequence[Message]) -> list[Piece]:
    """Llama-2-chat: each exchange a sequence of its own, the system's message inside the first."""
    system, turns = _split(messages)
    prefix = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system is not None else ""
    pieces = []
    for i, (user, assistant) in enumerate(turns):
        asked = f"[INST] {((prefix if i == 0 else '') + user).strip()} [/INST]"
        answered = "" if assistant is None else f" {assistant.strip()} "
        pieces.append(Piece(asked + answered, begins=True, ends=assistant is not None))
    return pieces


def vicuna(messages: Sequence[Message]) -> list[Piece]:
    """Vicuna from v1.1 on: one sequence, with an end of sequence after each answer."""
    system, turns = _split(messages)
    pieces = []
    for i, (user, assistant) in enumerate(turns):
        opening = f"{VICUNA_SYSTEM if system is None else system} " if i == 0 else ""
        answered = "" if assistant is None else f" {assistant}"
        pieces.append(Piece(f"{opening}USER: {user} ASSISTANT:{answered}", i == 0, assistant is not None))
    return pieces


BUILT_IN: dict[str, Callable[[Sequence[Message]], list[Piece]]] = {"llama-2": llama_2, "vicuna": vicuna}
_SPEAKS = {"llama-2": re.compile(r"llama[-_ ]?2.*chat"), "vicuna": re.compile(r"vicuna")}


def recognise(model: ModelDir) -> str | None:
    """The built-in format that the model's name asks for; None if the name says nothing."""
    for name in _names(model):
        for kind, pattern in _SPEAKS.items():
            if pattern.search(name.lower()):
                return kind
    return None


def read_template(path: Path) -> str:
    """A Jinja template's text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"no chat template {str(path)!r}: neither {', '.join(BUILT_IN)} nor a file that can "
                         f"be read ({reason})") from error


def _split(messages: Sequence[Message]) -> tuple[str | None, list[tuple[str, str | None]]]:
    """The system's message, and (question, answer) for each exchange; the last has no answer yet."""
    system = messages[0].content if messages and messages[0].role == "system" else None
    turns = messages[1:] if system is not None else messages
    for i, message in enumerate(turns):
        if message.role != ("user", "assistant")[i % 2]:
            raise UsageError("a chat is at most one system message, then user and assistant in turn: "
                             f"message {i + 1 + (system is not None)} is the {message.role}'s")
    if len(turns) % 2 == 0:
        raise UsageError("a chat must end with a message of the user's")
    answers = [message.content for message in turns[1::2]]
    return system, list(zip([message.content for message in turns[::2]], [*answers, None], strict=True))


def _names(model: ModelDir) -> list[str]:
    """What the model may be called: its directory, and what its files say of their origin."""
    names = [model.name]
    origins = ((model.target / "config.json", ("_name_or_path",)),
               (model.target / "tokenizer_config.json", ("name_or_path",)),
               (model.path / MANIFEST, ("source", "name")))
    for path, keys in origins:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            for key in keys:
                found = found[key]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a hint only: whoever needs the file says what is wrong with it
        names.append(str(found))
    return names
