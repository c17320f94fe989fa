"""Ollama's bodies, as those of chats and completions."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, ClassVar

from flowspec_edge.serving.door import Ready, effort_to_think, list_of, object_of, without_none
from flowspec_edge.serving.ollama.fields import OPTIONS, TABLE
from flowspec_edge.serving.openai.errors import ApiError
from flowspec_edge.serving.openai.field_table import Endpoint
from flowspec_edge.serving.openai.prepare import ServedModel
from flowspec_edge.serving.openai.schemas import Body, ChatBody, CompletionBody, body_of, parsed

_LATEST = ":latest"  # the tag of a name without one
_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_EFFORTS = ("low", "medium", "high")

# What ChatBody calls the fields, and what Ollama does.
NAMES = (("max_tokens", "options.num_predict"), ("response_format", "format"), ("reasoning_effort", "think"),
         ("repetition_penalty", "options.repeat_penalty"), *((name, f"options.{name}") for name in _SAME))
GENERATE_NAMES = (("messages", "prompt"), *NAMES)


class RawBody(CompletionBody):
    """A text to continue."""

    short: ClassVar[bool] = False


def read_chat(served_model: ServedModel, data: bytes) -> Body | Ready:
    """POST /api/chat."""
    fields = parsed(data)
    common, ignored = _common(served_model, "api/chat", fields)
    turns = [_turn(turn) for turn in list_of(fields.get("messages"), "messages")]
    if not turns:
        return _loaded(served_model, common["model"], {"message": {"role": "assistant", "content": ""}})
    last = turns[-1]
    goes_on = isinstance(last, dict) and last.get("role") == "assistant" and not last.get("tool_calls")
    return body_of(ChatBody, common | _thinking(served_model, fields) | without_none(
        messages=turns, tools=_tools(fields), continue_final_message=goes_on or None,
        logprobs=fields.get("logprobs"), top_logprobs=fields.get("top_logprobs")), ignored)


def read_generate(served_model: ServedModel, data: bytes) -> Body | Ready:
    """POST /api/generate. A model without a chat template continues the prompt."""
    fields = parsed(data)
    common, ignored = _common(served_model, "api/generate", fields)
    prompt, system, raw = (fields.get(name) for name in ("prompt", "system", "raw"))
    for name, value, kind in (("prompt", prompt, str), ("system", system, str), ("raw", raw, bool)):
        if value is not None and not isinstance(value, kind):
            raise ApiError(400, f"{name}: must be a {'string' if kind is str else 'boolean'}", name)
    if not prompt:
        return _loaded(served_model, common["model"], {"response": ""})
    if raw and system:
        raise ApiError(400, "system: with raw the prompt stays as it is: leave one out", "system")
    if raw or not (served_model.tokenizer.chats or system):
        if fields.get("think"):
            raise ApiError(400, "think: a text that is continued has no reasoning apart: leave out raw", "think")
        alternatives = fields.get("top_logprobs") or 0 if fields.get("logprobs") else None
        return body_of(RawBody, common | without_none(prompt=prompt, logprobs=alternatives), ignored)
    turns = [{"role": "system", "content": system}] if system else []
    return body_of(ChatBody, common | _thinking(served_model, fields) | without_none(
        messages=[*turns, {"role": "user", "content": prompt}],
        logprobs=fields.get("logprobs"), top_logprobs=fields.get("top_logprobs")), ignored)


def model_name(served_model: ServedModel, name: Any) -> str:
    """Return the served model's name, which may have the tag latest; ApiError if it is another one's."""
    if not isinstance(name, str):
        raise ApiError(400, "model: must be a string", "model")
    plain_name = name.removesuffix(_LATEST) if name == served_model.name + _LATEST else name
    served_model.check_name(plain_name)
    return plain_name


def now() -> str:
    """Write the time as Ollama's answers do."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def _loaded(served_model: ServedModel, model: str, empty: dict[str, Any]) -> Ready:
    """Answer a request without a prompt, by which clients load the model."""
    return Ready({"model": model, "created_at": now(), **empty, "done": True, "done_reason": "load"})


def _common(served_model: ServedModel, endpoint: Endpoint, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of both endpoints as a chat's, and those that have no effect."""
    options = object_of(fields.get("options"), "options")
    ignored = [*TABLE.ignored(endpoint, fields), *OPTIONS.ignored("options", options)]
    common = without_none(model=model_name(served_model, fields.get("model")),
                          response_format=_format(fields.get("format")),
                          max_tokens=_limit(options.get("num_predict")), flowspec=fields.get("flowspec"),
                          repetition_penalty=_penalty(options), **{name: options.get(name) for name in _SAME})
    stream = fields.get("stream")
    return common | {"stream": True if stream is None else stream}, ignored


def _limit(value: Any) -> Any:
    return None if isinstance(value, int) and value < 0 else value


def _penalty(options: dict[str, Any]) -> Any:
    """Over the whole text alone, which is what repetition_penalty is."""
    penalty, last = options.get("repeat_penalty"), options.get("repeat_last_n")
    if penalty is None or penalty == 1 or last == 0:
        return None
    if last != -1:
        raise ApiError(400, "options.repeat_penalty: it would look at the last tokens only: leave it out, or send "
                            "repeat_last_n: -1 for the whole text", "options.repeat_penalty",
                       "unsupported_parameter")
    return penalty


def _format(value: Any) -> dict[str, Any] | None:
    if value is None or value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise ApiError(400, 'format: must be "json", or a JSON schema that is an object', "format")
    return {"type": "json_object", "schema": value}


def _thinking(served_model: ServedModel, fields: dict[str, Any]) -> dict[str, Any]:
    think = fields.get("think")
    if think is None:
        return {}
    if isinstance(think, bool):
        return without_none(reasoning_effort=effort_to_think(served_model) if think else "none")
    if think not in _EFFORTS:
        raise ApiError(400, f"think: must be true, false, or one of {', '.join(_EFFORTS)}", "think")
    return {"reasoning_effort": think}


def _tools(fields: dict[str, Any]) -> list[Any] | None:
    tools = list_of(fields.get("tools"), "tools")
    return [{"type": "function", **without_none(**tool)} if isinstance(tool, dict) else tool for tool in tools] or None


def _turn(turn: Any) -> Any:
    """Return a message; what is wrong with it a chat's body says."""
    if not isinstance(turn, dict):
        return turn
    names = {"thinking": "reasoning_content", "tool_name": "name"}
    renamed = {names.get(name, name): value for name, value in turn.items() if value is not None}
    return {"content": "", **renamed}
