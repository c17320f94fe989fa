"""A door: an API whose requests are OpenAI's under other names, and its answers likewise.

Each door translates a body into a chat's or a completion's, and an answer's parts into its own objects; all else is
one path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec_edge.model.text import THINKING
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.prepare import PreparedRequest, ServedModel
from flowspec_edge.serving.openai.responses import Answer
from flowspec_edge.serving.openai.schemas import Body

THINK_EFFORT = "medium"  # of a client that says only that the model shall think


@dataclass(frozen=True)
class Ready:
    """An answer that needs no model."""

    content: dict[str, Any]


@dataclass(frozen=True)
class Door:
    """One API that clients speak to.

    read    a body, as a chat's or a completion's
    answer  the form of its answers
    names   patterns of the beginnings of fields' names in errors, and what the door calls these fields
    """

    read: Callable[[bytes], Body | Ready]
    answer: Callable[[Any, PreparedRequest], Answer] = Answer
    names: Sequence[tuple[str, str]] = ()

    def with_own_names(self, error: ApiError) -> ApiError:
        """Return the error with the door's names for the field."""
        for pattern, door_name in self.names if error.param else ():
            name, replacements = re.subn(f"^{pattern}(?![a-z_])", door_name, error.param or "", count=1)
            if replacements:
                message = str(error)
                if message.startswith(error.param or ""):
                    message = name + message[len(error.param or ""):]
                return ApiError(error.status, message, name, error.code, error.retry_after)
        return error


def changes_effort(served_model: ServedModel) -> bool:
    """Whether a variable of the chat template says how much the model thinks."""
    return any(map(served_model.tokenizer.reads, (*THINKING, "reasoning_effort")))


def effort_to_think(served_model: ServedModel) -> str | None:
    """Return the reasoning effort that lets the model think; None if it always does.

    A model that never does refuses it later.
    """
    if not changes_effort(served_model) and served_model.tokenizer.reasoning_format is not None:
        return None
    return THINK_EFFORT


def object_of(value: Any, name: str) -> dict[str, Any]:
    """Return a field that must be an object, or is left out; ApiError otherwise."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ApiError(400, f"{name}: must be an object", name)
    return value


def list_of(value: Any, name: str) -> list[Any]:
    """Return a field that must be a list, or is left out; ApiError otherwise."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ApiError(400, f"{name}: must be a list", name)
    return value


def without_none(**fields: Any) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
