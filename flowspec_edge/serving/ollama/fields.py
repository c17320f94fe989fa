"""What each field of Ollama's requests gets, and each of their ``options``."""

from __future__ import annotations

from typing import Any

from flowspec_edge.serving.openai.field_table import Endpoint, FieldTable, RequestField, Verdict

_BOTH: tuple[Endpoint, ...] = ("api/chat", "api/generate")
_CUT = "a prompt that does not fit is refused, never cut"
_LOADED = "the model is loaded when the server starts; see flowspec serve"
_TEXT_ONLY = "this server reads and writes text only"
_RULE = "it would choose tokens by another rule; use temperature, top_k, top_p and min_p"


def _field(name: str, endpoints: tuple[Endpoint, ...], elsewhere: Verdict, explanation: str, example: Any,
           *neutral: Any) -> RequestField:
    return RequestField(name, ("Ollama",), endpoints, elsewhere, explanation, example, neutral)


def _chats(name: str, explanation: str, example: Any) -> RequestField:
    return _field(name, ("api/chat",), "refused", explanation, example, [])


def _generates(name: str, explanation: str, example: Any, *neutral: Any) -> RequestField:
    return _field(name, ("api/generate",), "refused", explanation, example, *neutral)


def _does(name: str, explanation: str, example: Any) -> RequestField:
    return _field(name, _BOTH, "refused", explanation, example)


def _refused(name: str, explanation: str, example: Any, *neutral: Any) -> RequestField:
    return _field(name, (), "refused", explanation, example, *neutral)


def _harmless(name: str, explanation: str, example: Any) -> RequestField:
    return _field(name, (), "no effect", explanation, example)


TABLE = FieldTable((
    _does("model", "the served name, also with :latest", "a-model"),
    _chats("messages", "roles system, user, assistant and tool; without any the answer is empty", []),
    _chats("tools", "functions that the model may call; needs a chat template with tools", []),
    _generates("prompt", "the user's message; without one the answer is empty", "a"),
    _generates("system", "the system's message", "Be brief.", ""),
    _generates("raw", "true: the prompt is continued as it is, without a chat template", True, False),
    _does("stream", "lines of JSON, the default; false: one object", False),
    _does("format", '"json", or a JSON schema, which must be enforceable', "json"),
    _does("options", "see the next table", {"seed": 1}),
    _does("think", "true, false, low, medium, high: as reasoning_effort of OpenAI's chats", False),
    _does("logprobs", "the target's own probabilities", True),
    _does("top_logprobs", "up to 20 others at each token; goes with logprobs", 2),
    _does("flowspec", "this server's own: strategy, tokens", {"tokens": True}),
    _harmless("keep_alive", "the model stays loaded", "5m"),
    _harmless("truncate", _CUT, True),
    _harmless("shift", _CUT, True),
    _refused("images", _TEXT_ONLY, ["a"], []),
    _refused("suffix", "the model would have to write what comes before it; put both into the prompt", "a", ""),
    _refused("template", "it would render the chat otherwise; start the server with --chat-template", "a", ""),
    _refused("context", "answers have none to go on from; send the earlier turns to /api/chat", [1], []),
    _refused("width", _TEXT_ONLY, 64, 0),
    _refused("height", _TEXT_ONLY, 64, 0),
    _refused("steps", _TEXT_ONLY, 4, 0),
), len(_BOTH))


def _option(name: str, explanation: str, example: Any) -> RequestField:
    return _field(name, ("options",), "refused", explanation, example)


OPTIONS = FieldTable((
    _option("temperature", "0 is greedy; by default the model's own, not 0.8", 0.5),
    _option("top_k", "the k likeliest tokens; 0 keeps all", 20),
    _option("top_p", "the smallest set of likeliest tokens with this mass", 0.9),
    _option("min_p", "tokens at least so likely as this share of the likeliest one", 0.1),
    _option("seed", "a seed gives the same text with every strategy", 7),
    _option("num_predict", "the longest answer; a negative number is the server's --max-new-tokens, as by "
            "default", 8),
    _option("stop", "up to 64 strings", ["\n\n"]),
    _option("presence_penalty", "OpenAI's formula, over the answer", 0.5),
    _option("frequency_penalty", "OpenAI's formula, over the answer", 0.5),
    _option("repeat_penalty", "1 is off; another one needs repeat_last_n: -1, and is over prompt and answer", 1),
    _option("repeat_last_n", "-1 (the whole text) or 0 (off) with a repeat_penalty", -1),
    _refused("mirostat", _RULE, 2, 0),
    _harmless("mirostat_tau", "it goes with mirostat, which is refused", 4.0),
    _harmless("mirostat_eta", "it goes with mirostat, which is refused", 0.2),
    _refused("typical_p", _RULE, 0.5, 1),
    _refused("tfs_z", _RULE, 0.5, 1),
    _harmless("penalize_newline", "Ollama ignores it, too", True),
    _harmless("num_ctx", f"the context is the server's --context; {_CUT}", 4096),
    _harmless("num_keep", _CUT, 5),
    *(_harmless(name, _LOADED, example) for name, example in (
        ("numa", True), ("num_batch", 512), ("num_gpu", 1), ("main_gpu", 0), ("low_vram", True), ("f16_kv", True),
        ("logits_all", True), ("vocab_only", True), ("use_mmap", True), ("use_mlock", True),
        ("embedding_only", False), ("num_thread", 4))),
), 1, "options")
