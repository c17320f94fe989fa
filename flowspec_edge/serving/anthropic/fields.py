"""What each field of Anthropic's Messages API gets."""

from __future__ import annotations

from typing import Any

from flowspec_edge.serving.openai.field_table import FieldTable, RequestField, Verdict

_ONE_TIER = "there is one model on one pipeline, for every caller"


def _field(name: str, verdict: Verdict, explanation: str, example: Any, *neutral: Any) -> RequestField:
    if verdict == "implemented":
        return RequestField(name, ("Anthropic",), ("messages",), "refused", explanation, example, neutral)
    return RequestField(name, ("Anthropic",), (), verdict, explanation, example, neutral)


def _does(name: str, explanation: str, example: Any) -> RequestField:
    return _field(name, "implemented", explanation, example)


def _refused(name: str, explanation: str, example: Any, *neutral: Any) -> RequestField:
    return _field(name, "refused", explanation, example, *neutral)


def _harmless(name: str, explanation: str, example: Any) -> RequestField:
    return _field(name, "no effect", explanation, example)


TABLE = FieldTable((
    _does("model", "the served name", "a-model"),
    _does("max_tokens", "the longest answer, reasoning included", 8),
    _does("messages", "text, thinking, tool_use and tool_result blocks; an assistant's message at the end is "
          "continued", []),
    _does("system", "a text, or text blocks", "Be brief."),
    _does("stream", "server-sent events", True),
    _does("stop_sequences", "up to 64 strings", ["\n\n"]),
    _does("temperature", "from 0 (greedy) to 2; by default the model's own, not 1", 0.5),
    _does("top_k", "the k likeliest tokens", 20),
    _does("top_p", "the smallest set of likeliest tokens with this mass", 0.9),
    _does("tools", "functions (input_schema) that the program runs itself; needs a chat template with tools", []),
    _does("tool_choice", "auto, any, tool or none; disable_parallel_tool_use", {"type": "none"}),
    _does("thinking", "disabled, adaptive or enabled; budget_tokens has no effect, display: omitted leaves the "
          "thinking out", {"type": "disabled"}),
    _does("output_config", "format: a JSON schema, which must be enforceable; effort, where the chat template has "
          "one", {"effort": "low"}),
    _does("output_format", "as format in output_config", {"type": "json_schema", "schema": {"type": "object"}}),
    _does("metadata", "user_id tells callers apart in the queue", {"user_id": "me"}),
    _does("seed", "this server's own: the same text with every strategy", 7),
    _does("priority", "this server's own: from -10 to 10, lower is earlier", 1),
    _does("flowspec", "this server's own: strategy, tokens", {"tokens": True}),
    _refused("container", "nothing is run here", "a"),
    _refused("mcp_servers", "the server calls no tools itself; send tools", [{"url": "a"}], []),
    _harmless("cache_control", "the cache does not change the text", {"type": "ephemeral"}),
    _harmless("context_management", "a prompt that does not fit is refused, never cut", {"edits": []}),
    _harmless("diagnostics", "usage says what came from the cache", {}),
    _harmless("inference_geo", _ONE_TIER, "eu"),
    _harmless("service_tier", _ONE_TIER, "auto"),
    _harmless("speed", _ONE_TIER, "fast"),
    _harmless("user_profile_id", _ONE_TIER, "a"),
    _harmless("workspace_id", _ONE_TIER, "a"),
    _harmless("betas", "no beta is needed", ["a"]),
), 1)
