"""Anthropic's bodies, as those of chats."""

from __future__ import annotations

from typing import Any

from flowspec_edge.serving.anthropic.fields import TABLE
from flowspec_edge.serving.door import changes_effort, effort_to_think, list_of, object_of, without_none
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.prepare import ServedModel
from flowspec_edge.serving.openai.schemas import ChatBody, body_of, parsed

_SAME = ("model", "max_tokens", "stream", "temperature", "top_k", "top_p", "seed", "priority", "flowspec")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

# What ChatBody calls the fields, and what Anthropic does.
NAMES = (("stop", "stop_sequences"), ("response_format", "output_config.format"), ("reasoning_effort", "thinking"),
         ("user", "metadata.user_id"), (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
         (r"tools\[(\d+)\]\.function", r"tools[\1]"))


def read_messages(served_model: ServedModel, data: bytes) -> ChatBody:
    """POST /v1/messages."""
    fields = parsed(data)
    if fields.get("max_tokens") is None:
        raise ApiError(400, "max_tokens: is required", "max_tokens")
    return _chat(served_model, fields)


def read_counted(served_model: ServedModel, data: bytes) -> ChatBody:
    """POST /v1/messages/count_tokens."""
    return _chat(served_model, {**parsed(data), "max_tokens": None, "stream": None})


def _chat(served_model: ServedModel, fields: dict[str, Any]) -> ChatBody:
    ignored = [*TABLE.ignored("messages", fields)]
    turns = _turns(list_of(fields.get("messages"), "messages"))
    if not turns:
        raise ApiError(400, "messages: at least one is needed", "messages")
    goes_on = turns[-1]["role"] == "assistant"
    if (system := fields.get("system")) is not None:
        turns.insert(0, {"role": "system", "content": _texts(system, "system")})
    config = object_of(fields.get("output_config"), "output_config")
    if other := next((name for name in config if name not in ("effort", "format") and config[name] is not None), None):
        raise ApiError(400, f"output_config.{other} is not supported by this server: leave it out",
                       f"output_config.{other}", "unsupported_parameter")
    chat = {name: fields[name] for name in _SAME if fields.get(name) is not None} | without_none(
        messages=turns, continue_final_message=goes_on or None, stop=fields.get("stop_sequences"),
        response_format=_format(config.get("format") or fields.get("output_format")),
        user=object_of(fields.get("metadata"), "metadata").get("user_id"))
    chat |= _tools(fields) | _thinking(served_model, fields, config.get("effort"), ignored)
    return body_of(ChatBody, chat, ignored, cut_to_room=True)  # clients must name a limit, so they name a large one


def _thinking(served_model: ServedModel, fields: dict[str, Any], effort: Any, ignored: list[str]) -> dict[str, Any]:
    """Return what has no effect is added to ``ignored``."""
    if effort is not None and not changes_effort(served_model):
        ignored.append("output_config.effort")
        effort = None
    thinking = object_of(fields.get("thinking"), "thinking")
    kind = thinking.get("type") if thinking else "adaptive"
    if kind not in ("enabled", "disabled", "adaptive"):
        raise ApiError(400, "thinking.type: must be enabled, disabled or adaptive", "thinking.type")
    if thinking.get("budget_tokens") is not None:
        ignored.append("thinking.budget_tokens")
    if kind == "disabled":
        effort = "none"
    elif kind == "enabled":
        effort = effort or effort_to_think(served_model)
    return without_none(reasoning_effort=effort,
                        include_reasoning=False if thinking.get("display") == "omitted" else None)


def _format(value: Any) -> dict[str, Any] | None:
    value = object_of(value, "output_config.format")
    if not value:
        return None
    if value.get("type") != "json_schema" or not isinstance(value.get("schema"), dict):
        raise ApiError(400, 'output_config.format: must be {"type": "json_schema", "schema": {…}}',
                       "output_config.format")
    return {"type": "json_object", "schema": value["schema"]}


def _tools(fields: dict[str, Any]) -> dict[str, Any]:
    tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(list_of(fields.get("tools"), "tools"))]
    choice = object_of(fields.get("tool_choice"), "tool_choice")
    kind = choice.get("type")
    tool_choice: Any = None
    if kind == "tool":
        tool_choice = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice:
        if kind not in _CHOICES:
            raise ApiError(400, "tool_choice.type: must be auto, any, tool or none", "tool_choice.type")
        tool_choice = _CHOICES[kind]
    return without_none(tools=tools or None, tool_choice=tool_choice,
                        parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None)


def _tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise ApiError(400, f"{name}: must be an object", name)
    if tool.get("type") not in (None, "custom"):
        raise ApiError(400, f"{name}.type: {str(tool['type'])!r} is a tool that a server runs; this one runs none: "
                            "send functions with an input_schema", f"{name}.type", "unsupported_parameter")
    for field in ("defer_loading", "input_examples"):
        if tool.get(field):
            raise ApiError(400, f"{name}.{field} is not supported by this server: leave it out", f"{name}.{field}",
                           "unsupported_parameter")
    if not isinstance(tool.get("input_schema"), dict):
        raise ApiError(400, f"{name}.input_schema: must be a JSON schema that is an object",
                       f"{name}.input_schema")
    return {"type": "function", "function": without_none(
        name=tool.get("name"), description=tool.get("description"), parameters=tool["input_schema"],
        strict=tool.get("strict"))}


def _turns(messages: list[Any]) -> list[dict[str, Any]]:
    """Return a chat's messages: each result of a tool is one of its own, and neighbours of one role are one message."""
    turns: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        name = f"messages[{at}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise ApiError(400, f"{name}: must be an object whose role is user, assistant or system", name)
        for turn in _convert_message(message, name):
            last = turns[-1] if turns else {}
            if last.get("role") == turn["role"] == "user":
                last["content"] = "\n\n".join(filter(None, (last["content"], turn["content"])))
            else:
                turns.append(turn)
    return turns


def _convert_message(message: dict[str, Any], name: str) -> list[dict[str, Any]]:
    role, content = message["role"], message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not blocks:
        raise ApiError(400, f"{name}.content: must be a string, or a list of blocks", f"{name}.content")
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        block_name = f"{name}.content[{at}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_text(block, "text", block_name))
        elif kind == "thinking" and role == "assistant":
            thinking.append(_text(block, "thinking", block_name))
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # Anthropic encrypts it for its own models, so the served model cannot read it
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, block_name))
        elif kind == "tool_result" and role == "user":
            results.append({"role": "tool", "tool_call_id": _text(block, "tool_use_id", block_name),
                            "content": _texts(block.get("content") or "", f"{block_name}.content")})
        else:
            raise ApiError(400, f"{block_name}: blocks of the type {str(kind)[:40]!r} are not supported in a message "
                                f"of the {role}: this server reads text, thinking, tool_use and tool_result",
                           block_name, "unsupported_parameter")
    turn = {"role": role, "content": "\n".join(texts)} | without_none(
        tool_calls=calls or None, reasoning_content="\n".join(thinking) or None)
    return [*results, *([turn] if texts or calls or thinking else [])]


def _call(block: dict[str, Any], block_name: str) -> dict[str, Any]:
    function = {"name": _text(block, "name", block_name),
                "arguments": object_of(block.get("input"), f"{block_name}.input")}
    return {"id": _text(block, "id", block_name), "type": "function", "function": function}


def _texts(content: Any, name: str) -> str:
    """Return a text, or the text of text blocks."""
    if isinstance(content, str):
        return content
    texts = []
    for at, block in enumerate(list_of(content, name)):
        block_name = f"{name}[{at}]"
        if not isinstance(block, dict) or block.get("type") != "text":
            raise ApiError(400, f"{block_name}: must be a text block: this server reads text only", block_name,
                           "unsupported_parameter")
        texts.append(_text(block, "text", block_name))
    return "\n".join(texts)


def _text(block: dict[str, Any], field: str, block_name: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise ApiError(400, f"{block_name}.{field}: must be a string", f"{block_name}.{field}")
    return value
