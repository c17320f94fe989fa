"""Renders the chat templates of checkpoints, in a process with limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowspec_edge.errors import UsageError
from flowspec_edge.model.untrusted.processes import LimitedProcesses, LimitExceeded, Limits

_RENDERING = Limits(cpu_s=2.0, memory=256 * 2**20, stack=8 * 2**20)


class TemplateRenderer(LimitedProcesses):
    """The text is that of transformers' ``apply_chat_template``."""

    def __init__(self) -> None:
        super().__init__("template", _RENDERING)

    def render(self, template: str, special_tokens: Mapping[str, Any], messages: Sequence[Mapping[str, Any]],
               tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = False) -> str:
        """``special_tokens``: a tokenizer's ``special_tokens_map``. UsageError if the template fails, rejects
        the chat, or needs too much for it."""
        context = {**special_tokens, "messages": messages, "tools": tools or None, "documents": None,
                   "add_generation_prompt": add_generation_prompt}
        try:
            return self.run({"template": template, "context": context})
        except LimitExceeded as error:
            raise UsageError(f"it needs too much: {error}") from error
