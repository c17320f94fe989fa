"""Every documented field of a request, over HTTP: it does what it says, or the error names it, or the answer
is the same without it. The lists of names are facts: OpenAI's are read from its client, the others were
copied by hand from the servers' request types and documents in November 2026."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kits.http_server import NAME, Running, running, served
from kits.plain_answers import tokenizer_of
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sampling.settings import Penalties, Restrictions, Sampling
from flowspec_edge.serving.anthropic.fields import TABLE as ANTHROPIC
from flowspec_edge.serving.ollama.fields import OPTIONS
from flowspec_edge.serving.ollama.fields import TABLE as OLLAMA
from flowspec_edge.serving.openai.field_table import Endpoint, Source
from flowspec_edge.serving.openai.fields import ENDPOINTS, FIELDS

DOCS = Path(__file__).parents[3] / "docs"
OPENAI: dict[Endpoint, set[str]] = {
    "chat": {*chat_params.CompletionCreateParamsBase.__annotations__, "stream"},
    "completions": {*completion_params.CompletionCreateParamsBase.__annotations__, "stream"},
    "responses": {*response_params.ResponseCreateParamsBase.__annotations__, "stream"}}
VLLM = """messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
    reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p
    repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message add_special_tokens
    documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority
    request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_prompt_text return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection stream_interval best_of guided_json guided_regex guided_choice guided_grammar structural_tag
    guided_decoding_backend guided_whitespace_pattern logits_processors prompt suffix prompt_embeds background include
    input instructions max_output_tokens max_tool_calls metadata previous_response_id reasoning service_tier store
    text truncation prompt_cache_key enable_response_messages previous_input_messages previous_response"""
SGLANG = """model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
    stream stream_options suffix temperature top_p user return_hidden_states return_routed_experts
    routed_experts_start_len return_cached_tokens_details return_token_ids top_k min_p min_tokens json_schema regex
    ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id
    session_params response_format custom_params custom_logit_processor images_config bootstrap_host bootstrap_port
    bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt ngram_corpus_id
    priority custom_labels messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls
    return_prompt_token_ids return_meta_info reasoning_effort task continue_final_message separate_reasoning
    stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids reasoning
    background include input instructions max_output_tokens max_tool_calls metadata previous_response_id service_tier
    store text truncation request_id"""
LLAMA_CPP = """prompt temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_cmpl
    n_cache_reuse stream stop typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty dry_multiplier
    dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat
    mirostat_tau mirostat_eta grammar json_schema seed ignore_eos logit_bias n_probs min_keep t_max_predict_ms id_slot
    cache_prompt return_tokens samplers timings_per_token return_progress sse_ping_interval post_sampling_probs
    response_fields lora messages response_format chat_template_kwargs reasoning_effort reasoning_format
    reasoning_control parallel_tool_calls tools tool_choice max_tokens"""
NEEDED = {"model", "messages", "prompt", "input"}
TEMPLATE = """{% for turn in messages %}{{ turn.role }}: {% if turn.reasoning_content %}<think>{{ \
turn.reasoning_content }}</think>{% endif %}{{ turn.content }}\
{% for call in turn.tool_calls or [] %}{{ call.function.name }}({% if call.function.arguments is string %}{{ \
call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}){% endfor %}
{% endfor %}{% if documents %}{{ documents | length }} documents
{% endif %}{% if add_generation_prompt %}assistant: {% if enable_thinking is defined and \
enable_thinking is false %}\
<think></think>{% endif %}{% endif %}"""
ASK = [{"role": "user", "content": "hello"}]
PROMPT = "def f(x): return"


@pytest.fixture(scope="module")
def server(model: Path, processes: ProcessCluster) -> Iterator[Running]:
    pytest.importorskip("llguidance")
    with running(served(model, TEMPLATE, "autoregressive"), processes) as it:
        yield it


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return tokenizer_of(model)


def post(server: Running, endpoint: Endpoint, **fields: Any) -> Any:
    path, usual = {
        "chat": ("/v1/chat/completions", {"messages": ASK, "max_tokens": 4}),
        "completions": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}),
        "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 4})}[endpoint]
    return server.http.post(path, json={"model": NAME, **usual, **fields})


def complete(server: Running, **fields: Any) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of a completion."""
    answer = post(server, "completions", max_tokens=24, **{"flowspec": {"tokens": True}, **fields}).json()
    assert "error" not in answer, answer
    choice = answer["choices"][0]
    return answer["flowspec"]["tokens"], choice["text"], choice["finish_reason"]


@pytest.mark.parametrize(("source", "names"), [
    ("OpenAI", {name for names in OPENAI.values() for name in names}), ("vLLM", {*VLLM.split()}),
    ("SGLang", {*SGLANG.split()}), ("llama.cpp", {*LLAMA_CPP.split()})])
def test_every_documented_field_is_in_the_table(source: Source, names: set[str]) -> None:
    assert {name for name in names if name not in FIELDS or source not in FIELDS[name].sources} == set()


def test_the_document_has_the_tables() -> None:
    subprocess.run([sys.executable, DOCS / "build_fields.py", "--check"], check=True, cwd=DOCS.parent)
    written = (DOCS / "reference" / "fields.md").read_text()
    assert all(f"`{name}`" in written for table in (FIELDS, OLLAMA.fields, OPTIONS.fields, ANTHROPIC.fields)
               for name in table)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_refused_field_is_named_with_what_to_do(server: Running, endpoint: Endpoint) -> None:
    for name, field in FIELDS.items():
        if field.verdict(endpoint) != "refused":
            continue
        value = field.example if field.example or field.example in (0, False) else [{"a": 1}]
        if value in field.neutral:
            continue
        answer = post(server, endpoint, **{name: value})
        error = answer.json().get("error", {})
        assert (answer.status_code, error.get("param"), error.get("code")) == \
               (400, name, "unsupported_parameter"), (name, value, answer.text)
        assert error["message"].startswith(f"{name} is not supported by ")
        assert field.explanation in error["message"]
        assert "leave it out" in error["message"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_asks_for_nothing_changes_nothing(server: Running, endpoint: Endpoint) -> None:
    """Null for every field, the neutral values of the refused ones, and all harmless ones at once."""
    fields = [field for field in FIELDS.values() if field.name not in {*NEEDED, "max_tokens",
                                                                       "max_output_tokens"}]
    usual = post(server, endpoint).json()
    nothing: list[dict[str, Any]] = [
        {field.name: None for field in fields},
        *({field.name: field.neutral[at] for field in fields
           if field.verdict(endpoint) == "refused" and at < len(field.neutral)} for at in (0, 1)),
        {field.name: field.example for field in fields if field.verdict(endpoint) == "no effect"}]
    for asked in nothing:
        answer = post(server, endpoint, **asked)
        assert answer.status_code == 200, answer.text
        assert "x-flowspec-ignored" not in answer.headers
        key = "output" if endpoint == "responses" else "choices"
        assert re.sub("msg_[0-9a-f]+", "", json.dumps(answer.json()[key])) == \
               re.sub("msg_[0-9a-f]+", "", json.dumps(usual[key]))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_implemented_field_is_taken(server: Running, endpoint: Endpoint) -> None:
    for name, field in FIELDS.items():
        if endpoint not in field.implemented or name in NEEDED:
            continue
        more = {"logprobs": True} if name == "top_logprobs" else {}
        answer = post(server, endpoint, **{name: field.example, **more})
        assert answer.status_code == 200, (name, answer.text)
        assert "x-flowspec-ignored" not in answer.headers, name


@pytest.mark.parametrize(("wrong", "meant"), [
    ("temprature", "temperature"), ("maxTokens", "max_tokens"), ("Temperature", "temperature"),
    ("top-p", "top_p"), ("stops", "stop"), ("guided_jason", "guided_json"), ("min-tokens", "min_tokens")])
def test_a_misspelt_field_is_an_error(server: Running, wrong: str, meant: str) -> None:
    answer = post(server, "completions", **{wrong: 1})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, wrong, "unknown_parameter")
    assert f"did you mean {meant}?" in error["message"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_unknown_field_has_no_effect_and_the_answer_says_so(server: Running, endpoint: Endpoint) -> None:
    answer = post(server, endpoint, chat_id="a", made_up=[1], **{"a,b\n": 1})
    assert answer.status_code == 200
    assert answer.headers["x-flowspec-ignored"] == "chat_id, made_up, a?b?"
    assert answer.json()["flowspec"]["ignored"] == ["chat_id", "made_up", "a?b?"]
    streamed = post(server, endpoint, chat_id="a", stream=True)
    assert streamed.headers["x-flowspec-ignored"] == "chat_id"


@pytest.mark.parametrize(("fields", "param"), [
    ({"response_format": {"type": "json_object", "shema": {}}}, "response_format.shema"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"structured_outputs": {"json": {}, "regx": "a"}}, "structured_outputs.regx"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"disable_any_whitespace": True, "regex": "a"}},
     "structured_outputs.disable_any_whitespace"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_json": "{"}, "guided_json"), ({"guided_json": "[]"}, "guided_json"),
    ({"guided_json": {"type": "colour"}}, "guided_json"),
    ({"json_schema": {"uniqueItems": True}}, "json_schema"),
    ({"guided_regex": "("}, "guided_regex"), ({"regex": ""}, "regex"), ({"regex": "a\\"}, "regex"),
    ({"structured_outputs": {"regex": "a/\\\\\\"}}, "structured_outputs.regex"),
    ({"guided_choice": ["a", ""]}, "guided_choice"), ({"grammar": "root ::= ("}, "grammar"),
    ({"ebnf": "root ::= other"}, "ebnf"), ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"min_tokens": 9}, "min_tokens"), ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"allowed_token_ids": [97]}, "allowed_token_ids"), ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"bad_words": [""]}, "bad_words[0]"),
    ({"strategy": "magic"}, "strategy"), ({"strategy": "this:fly"}, "strategy"),
    ({"flowspec": {"strategy": "this:fly"}}, "flowspec.strategy"),
    ({"min_tokens": 5, "max_tokens": 4.0}, "min_tokens"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"stop": ["a", "b", "c", "d", ""]}, "stop"),
    ({"strategy": "flowspec", "flowspec": {"strategy": "chunk_pp"}}, "strategy"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"max_tokens": 8.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
])
def test_a_wrong_value_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    answer = post(server, "completions", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert "\n" not in answer.json()["error"]["message"]
    assert "this" not in sys.modules  # no module is imported because a client names it


def test_sampling_fields_are_plain_decodings(server: Running, plain: PlainDecoder, tokenizer: Any) -> None:
    """Of one strategy that drafts: what the fields ask for, every strategy does (drivers/virtual)."""
    ids = tokenizer(PROMPT)["input_ids"]
    usual = plain.generate(ids, 24, Sampling(1.0, seed=3))[0]
    bad = ["re", tokenizer.decode(usual[4:5])]
    words = tuple(dict.fromkeys(tuple(tokenizer(start + word, add_special_tokens=False)["input_ids"])
                                for word in bad for start in ("", " ")))
    ends = frozenset({usual[9]})
    cases: list[tuple[dict[str, Any], Sampling, frozenset[int], Penalties | None, Restrictions | None]] = [
        ({"min_p": 0.5, "top_p": 0.95, "seed": 3.0}, Sampling(1.0, 0, 0.95, 3, 0.5), frozenset(), None, None),
        ({"repetition_penalty": 1.5}, Sampling(1.0, seed=3), frozenset(), Penalties(repetition=1.5), None),
        ({"frequency_penalty": 0.5, "presence_penalty": 0.8, "logit_bias": {"40": 2, "41": -100}},
         Sampling(1.0, seed=3), frozenset(), Penalties(0.5, 0.8, {40: 2.0, 41: -100.0}), None),
        ({"bad_words": bad}, Sampling(1.0, seed=3), frozenset(), None, Restrictions(bad_words=words)),
        ({"allowed_token_ids": [40, 41, 42]}, Sampling(1.0, seed=3), frozenset(), None,
         Restrictions(frozenset({40, 41, 42}))),
        ({"stop_token_ids": [*ends]}, Sampling(1.0, seed=3), ends, None, None),
        ({"stop_token_ids": [*ends], "min_tokens": 12}, Sampling(1.0, seed=3), ends, None,
         Restrictions(min_tokens=12)),
        ({"top_p": 0}, Sampling(), frozenset(), None, None)]
    for fields, sampling, stops, penalties, restrictions in cases:
        expected, why = plain.generate(ids, 24, sampling, stops, penalties, restrictions)
        found = complete(server, temperature=1.0, strategy="flowspec", **{"seed": 3, **fields})
        assert (found[0], found[2]) == (expected, why), fields
        assert expected != usual, fields


def test_an_answer_goes_on_after_the_end_of_sequence(server: Running, model: Path) -> None:
    (end,) = OpenModel(model).stop_ids
    bias = {"logit_bias": {str(end): 100}}
    assert complete(server, **bias)[::2] == ([], "stop")
    tokens, text, why = complete(server, **bias, ignore_eos=True)
    assert (tokens, text, why) == ([end] * 24, "", "length")
    shown = complete(server, **bias, ignore_eos=True, skip_special_tokens=False)[1]
    assert shown == tokenizer_of(model).decode([end] * 24)


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_may_keep_what_ended_it(server: Running, plain: PlainDecoder, tokenizer: Any, stream: bool
                                           ) -> None:
    def text_of(**fields: Any) -> str:
        if not stream:
            return complete(server, **fields)[1]
        sent = post(server, "completions", max_tokens=24, stream=True, **fields).text
        return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                       for line in sent.splitlines() if line.startswith("data: {"))

    new = plain.generate(tokenizer(PROMPT)["input_ids"], 24, Sampling())[0]
    whole = tokenizer.decode(new)
    stop, end = whole[5:8], new[6]
    upto = whole.index(stop)
    assert text_of(stop=[*(f"never {i}" for i in range(4)), stop]) == whole[:upto]  # five strings
    assert text_of(stop=stop, include_stop_str_in_output=True) == whole[:upto + 3]
    assert text_of(stop=stop, no_stop_trim=True) == whole[:upto + 3]
    before = tokenizer.decode(new[:new.index(end)])
    assert text_of(stop_token_ids=[end]) == before
    assert text_of(stop_token_ids=[end], include_stop_str_in_output=True) == before + tokenizer.decode([end])
    assert len(text_of(stop=stop, min_tokens=20)) > upto + 3


@pytest.mark.parametrize(("field", "value", "pattern"), [
    ("guided_regex", r"(ab|cd){2}/\d{2}", r"(ab|cd){2}/\d{2}"), ("regex", "^x+y$", "x+y"),
    ("guided_choice", ["yes/no", 'say "x"\n'], r'yes/no|say "x"\n'),
    ("guided_grammar", 'root ::= "a" ("b" | "c")+ "."', r"a[bc]+\."),
    ("grammar", "# a list\nroot ::= item+ \"!\"\nitem ::= \"-\" [a-c]", r"(-[a-c])+!"),
    ("ebnf", 'start: "a" | "b"', "a|b"),
    ("structured_outputs", {"regex": "[0-9]{3}"}, "[0-9]{3}"),
    ("structured_outputs", {"choice": ["left", "right"], "json_object": False}, "left|right"),
    ("structured_outputs", {"grammar": 'root ::= "q"'}, "q"),
])
def test_a_grammar_holds(server: Running, field: str, value: Any, pattern: str) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 2, "strategy": "flowspec"}):
        answer = post(server, "completions", max_tokens=200, **{field: value}, **sampling).json()
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop", answer
        assert re.fullmatch(pattern, choice["text"])


SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 9}},
    "required": ["n"], "additionalProperties": False}

# What cannot be enforced is ignored if the schema is not strict; the rest holds.
LOOSE = {**SCHEMA, "properties": {"q": {"type": "string", "pattern": "(?=a)b", "maxLength": 4},
                                  **SCHEMA["properties"]}}


@pytest.mark.parametrize(("endpoint", "fields"), [
    ("completions", {"guided_json": SCHEMA}), ("completions", {"guided_json": json.dumps(SCHEMA)}),
    ("chat", {"json_schema": SCHEMA}), ("responses", {"json_schema": json.dumps(SCHEMA)}),
    ("chat", {"structured_outputs": {"json": SCHEMA}}),
    ("completions", {"response_format": {"type": "json_object", "schema": SCHEMA}}),
    ("chat", {"response_format": {"type": "json_schema", "schema": SCHEMA}}),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOSE}}}),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": LOOSE, "strict": None}}}),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": LOOSE}}}),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": SCHEMA, "strict": True}}}),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA},
                            "verbosity": "medium"}}),
])
def test_a_schema_holds(server: Running, endpoint: Endpoint, fields: dict[str, Any]) -> None:
    length = {"max_output_tokens" if endpoint == "responses" else "max_tokens": 200}
    answer = post(server, endpoint, **fields, **length).json()
    text = (answer["output"][0]["content"][0]["text"] if endpoint == "responses" else
            answer["choices"][0]["text"] if endpoint == "completions" else
            answer["choices"][0]["message"]["content"])
    assert 3 <= json.loads(text)["n"] <= 9


def rendered(tokenizer: Any, messages: list[Any], **how: Any) -> list[int]:
    """The prompt by transformers."""
    return list(tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=True,
                                              return_dict=False,
                                              **{"add_generation_prompt": True, **how}))


CUT = {"role": "assistant", "content": None, "tool_calls": [
    {"id": None, "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2'}}]}
BEGUN = [*ASK, {"role": "assistant", "content": "Well, I "}]


@pytest.mark.parametrize(("endpoint", "fields", "messages", "how"), [
    ("chat", {"chat_template_kwargs": {"enable_thinking": False}}, ASK, {"enable_thinking": False}),
    ("chat", {"chat_template_kwargs": {"enable_thinking": True}}, ASK, {"enable_thinking": True}),
    ("chat", {"enable_thinking": False}, ASK, {"enable_thinking": False}),
    ("chat", {"reasoning_effort": "none"}, ASK, {"enable_thinking": False}),
    ("chat", {"reasoning_effort": "high"}, ASK, {"enable_thinking": True}),
    ("chat", {"reasoning_effort": "minimal"}, ASK, {"enable_thinking": True}),
    ("responses", {"reasoning": {"effort": "none", "summary": "auto"}}, ASK, {"enable_thinking": False}),
    ("responses", {"chat_template_kwargs": {"enable_thinking": False}}, ASK, {"enable_thinking": False}),
    ("chat", {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, ASK,
     {"enable_thinking": True}),
    ("chat", {"documents": [{"text": "a"}, {"text": "b"}]}, ASK,
     {"documents": [{"text": "a"}, {"text": "b"}]}),
    ("chat", {"add_generation_prompt": False}, ASK, {"add_generation_prompt": False}),
    ("chat", {"messages": BEGUN, "continue_final_message": True}, BEGUN,
     {"add_generation_prompt": False, "continue_final_message": True}),
    ("chat", {"messages": [{"role": "assistant", "reasoning": "why", "content": "a"}, *ASK]},
     [{"role": "assistant", "reasoning_content": "why", "content": "a"}, *ASK], {}),
    ("chat", {"messages": [*ASK, CUT, {"role": "tool", "content": None, "tool_call_id": "1"}, *ASK]},
     [*ASK, {**CUT, "content": ""}, {"role": "tool", "content": ""}, *ASK], {}),
])
def test_a_chats_prompt_is_transformers(server: Running, plain: PlainDecoder, tokenizer: Any,
                                        endpoint: Endpoint,
                                        fields: dict[str, Any], messages: list[Any],
                                        how: dict[str, Any]) -> None:
    ids = rendered(tokenizer, messages, **how)
    answer = post(server, endpoint, flowspec={"tokens": True}, **fields).json()
    assert answer.get("error") is None, answer
    assert answer["usage"]["input_tokens" if endpoint == "responses" else "prompt_tokens"] == len(ids)
    assert answer["flowspec"]["tokens"] == plain.generate(ids, 4, Sampling())[0]


@pytest.mark.parametrize(("fields", "param"), [
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": [*ASK, {"role": "assistant", "content": "a", "prefix": True}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": [], "enable_thinking": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"bos_token": "a"}}, "chat_template_kwargs"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
])
def test_a_chat_that_cannot_be_rendered_so(server: Running, fields: dict[str, Any], param: str) -> None:
    answer = post(server, "chat", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_variable_that_the_template_does_not_have_is_told(server: Running) -> None:
    answer = post(server, "chat", chat_template_kwargs={"enable_thinkin": False, "enable_thinking": False})
    assert answer.headers["x-flowspec-ignored"] == "chat_template_kwargs.enable_thinkin"


def added(one: Any, other: Any) -> Any:
    """As LangChain and LiteLLM add up usage: whole numbers, and objects of them."""
    if isinstance(one, dict):
        return {name: added(one[name], other[name]) for name in one}
    assert type(one) is type(other) is int
    return one + other


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_usage_can_be_added_up(server: Running, endpoint: Endpoint) -> None:
    whole = post(server, endpoint, temperature=1, seed=5, frequency_penalty=1).json()
    assert added(whole["usage"], whole["usage"])["total_tokens"] == 2 * whole["usage"]["total_tokens"]
    assert (whole["flowspec"]["strategy"], whole["flowspec"]["seed"]) == ("autoregressive", 5)
    assert whole["flowspec"]["tokens_per_second"] > 0
    sent = post(server, endpoint, stream=True, stream_options={"include_usage": True}).text
    chunks = [json.loads(line.removeprefix("data: "
                                           "")) for line in sent.splitlines() if line.startswith("data: {")]
    last = chunks[-1]["response"] if endpoint == "responses" else chunks[-1]
    added(last["usage"], last["usage"])
    assert last["flowspec"]["strategy"] == "autoregressive"
    one = {"max_output_tokens" if endpoint == "responses" else "max_tokens": 1}
    short = post(server, endpoint, **one).json()
    assert short["usage"]["total_tokens"] == added(short["usage"], short["usage"])["total_tokens"] / 2
    assert short["flowspec"]["tokens_per_second"] is None  # one token has no rate
    several = {} if endpoint == "responses" else {"n": 2}
    added(*[post(server, endpoint, **several).json()["usage"]] * 2)


def test_a_count_of_log_probabilities_may_be_true(server: Running) -> None:
    tops = [post(server, "completions", **fields).json()["choices"][0]["logprobs"]["top_logprobs"]
            for fields in ({"logprobs": True}, {"logprobs": 1}, {"logprobs": True, "top_logprobs": 1})]
    assert tops[0] == tops[1] == tops[2]
    assert len(tops[0]) == 4
    assert post(server, "chat", logprobs=1, max_tokens=4.0).json()["choices"][0]["logprobs"]["content"]


def test_what_a_response_has_none_of_may_be_included(server: Running) -> None:
    """LiteLLM's adapter of Anthropic's API always asks for the first."""
    for included in ("reasoning.encrypted_content", "file_search_call.results",
                     "web_search_call.action.sources"):
        assert post(server, "responses", include=[included]).status_code == 200
