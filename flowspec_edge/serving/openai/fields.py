"""What each field of OpenAI's endpoints gets (:mod:`.field_table` has the rules).

These are all fields that OpenAI, vLLM, SGLang and llama.cpp's server document, and common ones of others.
"""

from __future__ import annotations

from typing import Any

from flowspec_edge.serving.openai.field_table import Endpoint, FieldTable, RequestField, Source, Verdict

ENDPOINTS: tuple[Endpoint, ...] = ("chat", "completions", "responses")
_SOURCES: dict[str, Source] = {"o": "OpenAI", "v": "vLLM", "s": "SGLang", "l": "llama.cpp", "x": "others"}
_LETTERS: dict[str, Endpoint] = {"c": "chat", "t": "completions", "r": "responses"}


def _field(name: str, sources: str, implemented: str, elsewhere: Verdict, explanation: str, example: Any,
           *neutral: Any) -> RequestField:
    return RequestField(name, tuple(_SOURCES[letter] for letter in sources),
                        tuple(_LETTERS[letter] for letter in implemented), elsewhere, explanation, example, neutral)


def _does(name: str, sources: str, explanation: str, example: Any, endpoints: str = "ctr", *neutral: Any
          ) -> RequestField:
    """Describe a field that some endpoints implement and the others refuse."""
    return _field(name, sources, endpoints, "refused", explanation, example, *neutral)


def _refused(name: str, sources: str, explanation: str, example: Any, *neutral: Any) -> RequestField:
    return _field(name, sources, "", "refused", explanation, example, *neutral)


def _harmless(name: str, sources: str, explanation: str, example: Any) -> RequestField:
    return _field(name, sources, "", "no effect", explanation, example)


_FIGURES = 'figures are under "flowspec", beside usage'
_IDS = 'it reports token ids; send "flowspec": {"tokens": true}'
_LOGPROBS = "it reports further probabilities; use logprobs and top_logprobs"
_DRAFTS = "drafting does not change the text"
_CACHE = "the cache does not change the text"
_ROUTING = "there is one model, and one pipeline"
_NO_IMAGES = "there are no images, audio or video here"
_STORES = "it stores nothing; send the earlier turns in input"
_OTHER_RULE = "it would choose tokens by another rule; use temperature, top_k, top_p and min_p"
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

_ALL: tuple[RequestField, ...] = (
    # ---- the request ----
    _does("model", "ovslx", "the served name", "llama"),
    _does("messages", "ovsl", "a chat's messages; completions take prompt, responses input", [], "c", []),
    _does("prompt", "ovsl", "a completion's text or token ids; chats take messages, responses input", "a",
          "t"),
    _does("input", "ovs", "a response's messages; chats take messages, completions prompt", "a", "r"),
    _does("instructions", "ovs", "the system's message; chats take it in messages", "Be brief.", "r"),
    _does("stream", "ovsl", "server-sent events", True),
    _does("stream_options", "ovs", "include_usage; counts come at the end", {"include_usage": True}),
    _does("user", "ovs", "tells callers apart in the queue", "me"),
    _does("priority", "vs", "from -10 to 10, lower is earlier", 1),
    _does("flowspec", "x", "this server's own: strategy, tokens", {"tokens": True}),
    _does("strategy", "x", "as flowspec.strategy", "autoregressive"),
    # ---- length and end ----
    _does("max_tokens", "ovsl", "the longest answer; responses take max_output_tokens", 8, "ct"),
    _does("max_completion_tokens", "ovs", "a chat's max_tokens; completions take max_tokens, responses "
          "max_output_tokens", 8, "c"),
    _does("max_output_tokens", "ovs", "a response's longest answer; the others take max_tokens", 8, "r"),
    _does("min_tokens", "vs", "no end, and no stop string, before so many tokens", 2, "ctr", 0),
    _does("stop", "ovsl", "up to 64 strings", ["\n\n"]),
    _does("stop_token_ids", "vs", "further tokens that end the answer", [5]),
    _does("ignore_eos", "vsl", "the model's own end tokens do not end the answer", True),
    _does("include_stop_str_in_output", "v", "the answer has the stop string, or the text of the stop token",
          True),
    _does("no_stop_trim", "s", "as include_stop_str_in_output", True),
    _refused("stop_regex", "s",
             "it would end the answer at a pattern; use stop, or regex for the whole answer",
             "a+", [], ""),
    # ---- sampling ----
    _does("temperature", "ovslx", "0 is greedy", 1.0),
    _does("top_p", "ovslx", "the smallest set of likeliest tokens with this mass; 0 is greedy", 0.9),
    _does("top_k", "vslx", "the k likeliest tokens; 0 and -1 keep all", 20),
    _does("min_p", "vsl", "tokens at least so likely as this share of the likeliest one", 0.1),
    _does("seed", "ovsl", "a seed gives the same text with every strategy; llama.cpp's -1 is a seed here", 7),
    _does("frequency_penalty", "ovsl", "OpenAI's formula, over the answer", 0.5),
    _does("presence_penalty", "ovsl", "OpenAI's formula, over the answer", 0.5),
    _does("repetition_penalty", "vs", "transformers' formula, over prompt and answer; 1 is off", 1.2),
    _does("logit_bias", "ovsl", "token ids and numbers from -100 to 100, also as llama.cpp's list of pairs",
          {"5": 1}),
    _does("allowed_token_ids", "v", "the answer has these tokens only, its end among them", [5, 6]),
    _does("bad_words", "v", "words that the text may not have, alone or after a space",
          ["bad"]),
    _does("n", "ovs", "up to 8 choices; responses have one", 2, "ct", 1),
    # ---- grammars ----
    _does("response_format", "ovsl", "json_object, also with a schema, and json_schema; responses take "
          "text.format", {"type": "json_object"}, "ct", {"type": "text"}),
    _does("text", "ovs", "a response's format; the others take response_format. verbosity is refused",
          {"format": {"type": "json_object"}}, "r"),
    _does("guided_json", "vx", "a JSON schema, as an object or as text", _SCHEMA),
    _does("guided_regex", "vx", "a regular expression of the whole answer", "[ab]+"),
    _does("guided_choice", "vx", "the answer is one of these texts", ["yes", "no"]),
    _does("guided_grammar", "vx", "a grammar in GBNF or in llguidance's Lark", 'root ::= "a"'),
    _does("structured_outputs", "v", "one of json, regex, choice, grammar, json_object",
          {"choice": ["a", "b"]}),
    _does("json_schema", "sl", "as guided_json", _SCHEMA),
    _does("regex", "s", "as guided_regex", "[ab]+"),
    _does("ebnf", "s", "as guided_grammar", 'root ::= "a"'),
    _does("grammar", "l", "as guided_grammar", 'root ::= "a"'),
    _harmless("guided_decoding_backend", "v", "llguidance enforces every grammar", "outlines"),
    _refused("guided_whitespace_pattern", "v",
             "it would change the whitespace within JSON; use guided_regex or "
             "guided_grammar", " ?"),
    _refused("structural_tag", "vs",
             "it would hold parts of the answer to schemas; use guided_grammar, or tools",
             "{}"),
    # ---- chats ----
    _does("tools", "ovsl", "functions that the model may call; completions have none", [], "cr", []),
    _field("tool_choice", "ovsl", "cr", "refused",
           "auto, none, required, or a function; completions have no tools",
           "none", "auto", "none"),
    _field("parallel_tool_calls", "ovsl", "cr", "no effect", "several calls in an answer", False),
    _field("max_tool_calls", "ovs", "", "no effect", "the server calls no tools itself", 3),
    _refused("functions", "o", "the predecessor of tools; use tools", [{"name": "f"}], []),
    _refused("function_call", "o", "the predecessor of tool_choice; use tool_choice", {"name": "f"}, "none",
             "auto"),
    _does("chat_template_kwargs", "vsl", "variables of the model's chat template, such as enable_thinking; "
          "completions have no template", {"enable_thinking": False}, "cr", {}),
    _does("reasoning_effort", "ovsl", "none turns reasoning off; the others set the template's "
          "reasoning_effort, or turn reasoning on; responses take reasoning", "none", "c"),
    _does("reasoning", "ovs", "a response's effort, as reasoning_effort", {"effort": "none"}, "cr"),
    _does("enable_thinking", "x", "as in chat_template_kwargs", False, "cr"),
    _does("add_generation_prompt", "v", "false: the prompt does not open an answer", False, "c", True),
    _does("continue_final_message", "vs", "the answer continues the last message", False, "c", False),
    _does("documents", "v", "the chat template's documents", [], "c", []),
    _does("add_special_tokens", "v",
          "whether a prompt gets the tokenizer's own special tokens; default: in "
          "completions", False, "ct"),
    _does("skip_special_tokens", "vs", "false: the text has the special tokens", False),
    _harmless("spaces_between_special_tokens", "v", "tokenizers here put no spaces there", False),
    _refused("chat_template", "v",
             "it would render the chat otherwise; start the server with --chat-template",
             "{{ messages }}"),
    _refused("thinking", "x", "it would limit or turn off reasoning; use chat_template_kwargs: "
             '{"enable_thinking": false} or reasoning_effort', {"type": "disabled"}),
    _refused("thinking_token_budget", "v",
             "it would end the reasoning after so many tokens; use max_tokens, or "
             'chat_template_kwargs: {"enable_thinking": false}', 100, -1),
    _refused("thinking_budget", "x", "as thinking_token_budget", 100, -1),
    _refused("thinking_budget_tokens", "l", "as thinking_token_budget", 100, -1),
    _field("include_reasoning", "v", "cr", "no effect", "false: the answer is without the reasoning", False),
    _field("separate_reasoning", "s", "cr", "no effect", "false: the reasoning is a part of the content", False),
    _harmless("stream_reasoning", "s", "streams always have the reasoning as it comes", False),
    _field("reasoning_format", "l", "cr", "no effect",
           "auto and deepseek, the default: reasoning apart; none: as separate_reasoning: false", "none"),
    _refused("reasoning_control", "l", "it would end reasoning while it is written; use max_tokens", True,
             False),
    _refused("verbosity", "o", "the model was not trained to it; say in the messages how long to answer",
             "low",
             "medium"),
    _refused("task", "s", "it would add a token to the prompt; use messages", "action"),
    _refused("input_ids", "s", "it would replace the prompt; use prompt of /v1/completions", [5]),
    _refused("session_params", "s", "it would continue a stored prompt; send the whole prompt", {"id": "a"},
             {}),
    _refused("echo", "ovs", "it returns no prompts and no log-probabilities of them", True, False),
    _refused("suffix", "ovs", "the model would have to write what comes before it; put both into the prompt",
             "a", ""),
    _refused("truncate_prompt_tokens", "v", "it would cut the prompt; cut it before you send it", 5),
    _refused("truncation_side", "v", "it goes with truncate_prompt_tokens", "left"),
    _refused("prompt_embeds", "v", "prompts are tokens here; use prompt", "a"),
    # ---- what is reported ----
    _does("logprobs", "ovsl", "the target's own probabilities; in completions a count. Responses have none",
          1,
          "ct", False),
    _does("top_logprobs", "ovs", "up to 20 others at each token; goes with logprobs", 2, "ct", 0),
    _refused("prompt_logprobs", "v", "no probabilities of the prompt are computed", 1),
    _refused("logprob_token_ids", "v", _LOGPROBS, [5]),
    _refused("n_probs", "l", _LOGPROBS, 2, 0),
    _refused("post_sampling_probs", "l", _LOGPROBS, True, False),
    _refused("return_tokens_as_token_ids", "v", _IDS, True, False),
    _refused("return_token_ids", "vs", _IDS, True, False),
    _refused("return_tokens", "l", _IDS, True, False),
    _refused("return_prompt_token_ids", "s", "no ids of the prompt are reported", True, False),
    _refused("return_prompt_text", "v", "no text of the prompt is reported", True, False),
    _harmless("return_token_offsets", "v", "vLLM ignores it at these endpoints, too", True),
    _harmless("return_mm_kwargs", "v", "vLLM ignores it at these endpoints, too", True),
    _refused("return_hidden_states", "s", "no hidden states are reported", True, False),
    _refused("return_routed_experts", "s", "no experts are reported", True, False),
    _harmless("routed_experts_prompt_start", "v", "no experts are reported", 1),
    _harmless("routed_experts_start_len", "s", "no experts are reported", 1),
    _refused("return_meta_info", "s", _FIGURES, True, False),
    _harmless("return_cached_tokens_details", "s", "usage always has cached_tokens", True),
    _harmless("return_progress", "l", "keep-alives say where a waiting request is", True),
    _harmless("timings_per_token", "l", _FIGURES, True),
    _refused("response_fields", "l", "answers have OpenAI's fields", ["content"], []),
    _refused("enable_response_messages", "v", "no rendered messages are reported", True, False),
    _does("include", "ovs",
          "items that no response has add nothing; message.output_text.logprobs is refused: "
          "chat completions have logprobs", ["reasoning.encrypted_content"], "r", []),
    _harmless("stream_interval", "v", "the text is the same in other pieces", 4),
    _harmless("sse_ping_interval", "l", "keep-alives come every ten seconds", 5),
    # ---- other rules of choosing, which are not implemented ----
    _refused("best_of", "ovs", "it would generate several answers and return the best; use n", 2, 1, 0),
    _refused("use_beam_search", "v", "it would search for likely texts; sample, or set n", True, False),
    _refused("length_penalty", "v", "it goes with beam search", 2.0, 1, 0),
    _refused("num_beams", "x", "it would search for likely texts; sample, or set n", 4, 1),
    _refused("typical_p", "lx", _OTHER_RULE, 0.5, 1),
    _refused("top_n_sigma", "l", _OTHER_RULE, 1.0, -1, 0),
    _refused("top_a", "x", _OTHER_RULE, 0.5, 0),
    _refused("tfs_z", "lx", _OTHER_RULE, 0.5, 1),
    _refused("epsilon_cutoff", "x", _OTHER_RULE, 0.1, 0),
    _refused("eta_cutoff", "x", _OTHER_RULE, 0.1, 0),
    _refused("mirostat", "lx", _OTHER_RULE, 2, 0),
    _harmless("mirostat_tau", "lx", "it goes with mirostat, which is refused", 4.0),
    _harmless("mirostat_eta", "lx", "it goes with mirostat, which is refused", 0.2),
    _refused("dynatemp_range", "l", "temperature would depend on the tokens; use temperature", 0.5, 0),
    _harmless("dynatemp_exponent", "l", "it goes with dynatemp_range, which is refused", 2.0),
    _refused("xtc_probability", "l", "it would leave out likely tokens at random; use temperature", 0.5, 0),
    _harmless("xtc_threshold", "l", "it goes with xtc_probability, which is refused", 0.2),
    _refused("dry_multiplier", "l", "it would penalise repeated sequences; use repetition_penalty or "
             "frequency_penalty", 0.8, 0),
    _harmless("dry_base", "l", "it goes with dry_multiplier, which is refused", 1.5),
    _harmless("dry_allowed_length", "l", "it goes with dry_multiplier, which is refused", 3),
    _harmless("dry_penalty_last_n", "l", "it goes with dry_multiplier, which is refused", 3),
    _harmless("dry_sequence_breakers", "l", "it goes with dry_multiplier, which is refused", ["\n"]),
    _refused("repeat_penalty", "lx",
             "it would look at the last tokens; use repetition_penalty, which looks at "
             "the whole text", 1.1, 1),
    _harmless("repeat_last_n", "lx", "it goes with repeat_penalty, which is refused", 32),
    _refused("adaptive_target", "l", _OTHER_RULE, 0.5, -1),
    _harmless("adaptive_decay", "l", "it goes with adaptive_target, which is refused", 0.5),
    _refused("no_repeat_ngram_size", "x", "it would exclude repeated sequences; use repetition_penalty or "
             "bad_words", 3, 0),
    _refused("penalty_alpha", "x", _OTHER_RULE, 0.6, 0),
    _refused("guidance_scale", "x", "it would decode a second prompt; write it into the prompt", 1.5, 1),
    _refused("negative_prompt", "x", "it goes with guidance_scale", "a", ""),
    _refused("min_keep", "l", "it would widen top_k, top_p and min_p; widen these", 2, 0, 1),
    _refused("samplers", "l", "the order is fixed: temperature, top_k, top_p, min_p", ["top_k"], []),
    _refused("repetition_detection", "v", "it would end an answer that repeats itself; use max_tokens or "
             "repetition_penalty", {"max_pattern_size": 3}),
    _refused("watermarking", "v", "it would change which tokens are chosen", True, False),
    _refused("logits_processors", "v", "it would run code of the client; use logit_bias or a grammar",
             ["a.b"], []),
    _refused("custom_logit_processor", "s", "it would run code of the client; use logit_bias or a grammar",
             "a"),
    _refused("custom_params", "s", "it goes with custom_logit_processor", {"a": 1}, {}),
    _refused("vllm_xargs", "v", "there are no extensions of vLLM here", {"a": 1}, {}),
    _refused("n_predict", "l", "use max_tokens", 8, -1),
    _refused("n_cmpl", "l", "use n", 2, 1),
    _refused("n_indent", "l", "it would hold lines to an indentation; use guided_grammar", 2, 0),
    _harmless("n_keep", "l", "a prompt that does not fit is refused, never cut", 5),
    _harmless("n_discard", "l", "a prompt that does not fit is refused, never cut", 5),
    _harmless("n_cache_reuse", "l", _CACHE, 64),
    _refused("t_max_predict_ms", "l", "it would end the answer by the clock; use max_tokens, or close the "
             "connection", 100, 0, -1),
    _refused("lora", "l", "there are no adapters here", [{"id": 0, "scale": 1}], []),
    _refused("lora_path", "s", "there are no adapters here", "a"),
    _refused("prediction", "o", "the text would not change; drafts come from the server's own models",
             {"type": "content", "content": "a"}),
    _refused("modalities", "o", "answers are text", ["audio"], ["text"]),
    _refused("audio", "o", "answers are text", {"voice": "a", "format": "mp3"}),
    _refused("web_search_options", "o", "nothing is searched; put what was found into the messages", {}),
    # ---- responses ----
    _refused("previous_response_id", "ovs", _STORES, "resp_1"),
    _refused("previous_response", "v", _STORES, {"id": "a"}),
    _refused("previous_input_messages", "v", _STORES, [{"role": "user"}], []),
    _refused("conversation", "o", _STORES, "conv_1"),
    _refused("background", "ovs", "it stores nothing; wait for the answer, or stream it", True, False),
    _refused("truncation", "ovs", "it would cut the prompt; cut it before you send it", "auto", "disabled"),
    _harmless("context_management", "o", "a prompt that does not fit is refused, never cut", [{}]),
    _harmless("background_options", "o", "it goes with background, which is refused", {}),
    _harmless("access_programs", "o", "the model is the same for every caller", {}),
    _harmless("image", "o", _NO_IMAGES, {}),
    _refused("moderation", "o", "nothing is checked here", {"model": "a"}),
    # ---- what says nothing about the answer ----
    _harmless("metadata", "ovs", "responses return it", {"a": "b"}),
    _harmless("store", "ovs", "the server stores nothing", True),
    _harmless("service_tier", "ovs", "there is one tier; see priority", "flex"),
    _harmless("safety_identifier", "o", "nothing is reported", "me"),
    _harmless("prompt_cache_key", "ov", _CACHE, "a"),
    _harmless("prompt_cache_retention", "o", _CACHE, "24h"),
    _harmless("prompt_cache_options", "o", _CACHE, {"mode": "implicit"}),
    _harmless("cache_prompt", "l", _CACHE, False),
    _refused("cache_salt", "vs", "prompts of all callers share one cache, so a salt would not separate them",
             "a"),
    _harmless("extra_key", "s", _CACHE, "a"),
    _harmless("request_id", "vs", "x-request-id is the answer's id", "a"),
    _harmless("rid", "s", "x-request-id is the answer's id", "a"),
    _harmless("session_id", "vs", "requests of one session need nothing in common", "a"),
    _harmless("custom_labels", "s", "metrics have no labels of requests", {"a": "b"}),
    _harmless("id_slot", "l", _ROUTING, 0),
    _harmless("routed_dp_rank", "s", _ROUTING, 0),
    _harmless("data_parallel_rank", "s", _ROUTING, 0),
    _harmless("disagg_prefill_dp_rank", "s", _ROUTING, 0),
    _refused("kv_transfer_params", "v", "caches are not moved between servers", {"a": 1}, {}),
    _refused("ec_transfer_params", "v", "caches are not moved between servers", {"a": 1}, {}),
    _refused("bootstrap_host", "s", "caches are not moved between servers", "a"),
    _refused("bootstrap_port", "s", "caches are not moved between servers", 1),
    _refused("bootstrap_room", "s", "caches are not moved between servers", 1),
    _harmless("ngram_corpus_id", "s", _DRAFTS, "a"),
    _harmless("backend_sampling", "l", "it says where tokens are chosen, not which", True),
    _harmless("speculative", "l", _DRAFTS, {"n_max": 4}),
    _harmless("parse_tool_calls", "l", "tool calls are always parsed", True),
    _harmless("mm_processor_kwargs", "v", _NO_IMAGES, {"a": 1}),
    _harmless("media_io_kwargs", "v", _NO_IMAGES, {"a": {}}),
    _harmless("images_config", "s", _NO_IMAGES, {"a": 1}),
    _harmless("max_dynamic_patch", "s", _NO_IMAGES, 1),
    _harmless("min_dynamic_patch", "s", _NO_IMAGES, 1),
    _harmless("use_audio_in_video", "s", _NO_IMAGES, True),
    # ---- names of other interfaces ----
    _refused("max_new_tokens", "x", "use max_tokens", 8),
    _refused("max_length", "x", "use max_tokens", 8),
    _refused("num_predict", "x", "use max_tokens", 8, -1),
    _refused("num_ctx", "x", "start the server with --context", 4096),
    _refused("options", "x", "use temperature, top_p, max_tokens and the others at the top level",
             {"seed": 1}, {}),
    _refused("format", "x", "use response_format", "json", ""),
    _refused("do_sample", "x", "use temperature", True),
    _refused("random_seed", "x", "use seed", 7),
    _refused("stop_sequences", "x", "use stop", ["a"], []),
    _refused("system", "x", "send a message of the role system", "a"),
    _refused("safe_prompt", "x", "send a message of the role system", True, False),
    _refused("models", "x", "there is one model", ["a"], []),
    _refused("plugins", "x", "there are none", [{"id": "web"}], []),
    _refused("transforms", "x", "it would cut the prompt; cut it before you send it", ["middle-out"], []),
    _harmless("provider", "x", _ROUTING, {"order": ["a"]}),
    _harmless("route", "x", _ROUTING, "fallback"),
    _harmless("keep_alive", "x", "the model stays loaded", "5m"),
)

TABLE = FieldTable(_ALL, len(ENDPOINTS))
FIELDS = TABLE.fields
