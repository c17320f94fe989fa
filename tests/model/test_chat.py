"""Chat formats against what was published for them, and through real tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.small_tokenizers import save, sentencepiece_style
from kits.tiny_models import EOS, tiny_llama, tiny_tokenizer

from flowspec_edge.errors import UsageError
from flowspec_edge.model.chat import (
    Message,
    PromptPiece,
    llama_2,
    recognise,
    turn_ends,
    variables_of,
    vicuna,
)
from flowspec_edge.model.opened import OpenModel, resolve_model
from flowspec_edge.model.text import Tokenizer

ASK = [Message("user", "Who are you?")]
BRIEF = [Message("system", "Be brief."), *ASK]
LONG = [Message("user", "Hi!"), Message("assistant", "Hello."), Message("user", "And you?"),
        Message("assistant", "Fine."), Message("user", "Bye")]
CHATS = [ASK, BRIEF, LONG, [BRIEF[0], *LONG]]

# As it comes with meta-llama/Llama-2-7b-chat-hf's tokenizer_config.json.
LLAMA_2_JINJA = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}")
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content "
          "+ '<|im_end|>' + '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def written(pieces: list[PromptPiece]) -> str:
    return "".join(("<s>" if p.add_bos else "") + p.text + ("</s>" if p.add_eos else "") for p in pieces)


def plain(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]


VICUNA = ("A chat between a curious user and an artificial intelligence assistant. The assistant gives "
          "helpful, detailed, and polite answers to the user's questions.")


@pytest.mark.parametrize(("messages", "text"), [
    (ASK, f"<s>{VICUNA} USER: Who are you? ASSISTANT:"),
    (BRIEF, "<s>Be brief. USER: Who are you? ASSISTANT:"),
    (LONG, f"<s>{VICUNA} USER: Hi! ASSISTANT: Hello.</s>USER: And you? ASSISTANT: Fine.</s>"
           "USER: Bye ASSISTANT:"),
])
def test_vicuna_as_published(messages: list[Message], text: str) -> None:
    assert written(vicuna(messages)) == text


@pytest.mark.parametrize("messages", [*CHATS, [Message("system", " s "), Message("user", " \n padded  ")],
                                      [Message("user", "\n x\n"), Message("assistant", " y "),
                                       Message("user", " ")]])
def test_llama_2_is_transformers_own_template(messages: list[Message]) -> None:
    rendered = sentencepiece_style().apply_chat_template(plain(messages), chat_template=LLAMA_2_JINJA,
                                                         tokenize=False)
    assert written(llama_2(messages)) == rendered


@pytest.mark.parametrize("write", [llama_2, vicuna])
@pytest.mark.parametrize(("messages", "says"), [
    ([], "must end with a user message"),
    (LONG[:2], "must end with a user message"),
    (LONG[1:], "message 1 is the assistant's"),
    ([BRIEF[0], BRIEF[0], *ASK], "message 2 is the system's"),
    ([BRIEF[0], *ASK, *ASK], "message 3 is the user's"),
])
def test_chats_that_are_none(write: object, messages: list[Message], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        write(messages)  # type: ignore[operator]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with no known name and a sentencepiece-style tokenizer without a template."""
    target = tiny_llama(tmp_path / "model" / "target", layers=1, hidden=32, vocab=400)
    save(sentencepiece_style(), target)
    return target.parent


def rename(model: Path, name: str) -> OpenModel:
    return resolve_model(model.rename(model.with_name(name)))


@pytest.mark.parametrize(("name", "kind"), [
    ("Llama-2-7b-chat-hf", "llama-2"), ("llama2-13b-chat", "llama-2"), ("Llama-2-7b-hf", None),
    ("vicuna-7b-v1.5", "vicuna"), ("Vicuna_13B", "vicuna"), ("Mistral-7B-Instruct-v0.1", None),
])
def test_models_are_known_by_name(model: Path, name: str, kind: str | None) -> None:
    assert recognise(rename(model, name)) == kind


@pytest.mark.parametrize(("file", "content"), [
    ("target/config.json", {"_name_or_path": "lmsys/vicuna-7b-v1.3"}),
    ("target/tokenizer_config.json", {"name_or_path": "lmsys/vicuna-7b-v1.3"}),
])
def test_models_are_known_by_their_origin(model: Path, file: str, content: dict[str, object]) -> None:
    path = model / file
    path.write_text(json.dumps(json.loads(path.read_text()) | content))
    assert recognise(resolve_model(model)) == "vicuna"


def test_a_sharded_model_is_known_by_its_source(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"source": {"name": "meta-llama/Llama-2-7b-chat-hf"}}))
    assert recognise(OpenModel(tmp_path)) == "llama-2"


def test_exchanges_are_encoded_one_by_one(model: Path) -> None:
    """As the models were trained: a sequence of its own, which begins with "▁", for each exchange."""
    raw = sentencepiece_style()

    def encoded(text: str) -> list[int]:
        ids: list[int] = raw(text, add_special_tokens=False)["input_ids"]
        return ids

    ids = Tokenizer(resolve_model(model), "llama-2").chat(LONG[:3])
    assert ids == [1, *encoded("[INST] Hi! [/INST] Hello. "), 2, 1, *encoded("[INST] And you? [/INST]")]
    tokenizer = Tokenizer(rename(model, "vicuna-7b"))
    assert tokenizer.chat(LONG[:3]) == [1, *encoded(f"{VICUNA} USER: Hi! ASSISTANT: Hello."), 2,
                                        *encoded("USER: And you? ASSISTANT:")]
    assert tokenizer.chat_stop_ids == {2}


def test_the_tokenizers_own_template_comes_first(model: Path) -> None:
    own = tiny_tokenizer(300)
    own.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|eot_id|>"]})
    own.chat_template = CHATML
    save(own, model / "target")
    found = rename(model, "vicuna-7b")
    tokenizer = Tokenizer(found)
    ids = tokenizer.chat(BRIEF)
    assert ids == own.apply_chat_template(plain(BRIEF), add_generation_prompt=True, return_dict=False)
    assert own.decode(ids) == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho are you?"
                               "<|im_end|>\n<|im_start|>assistant\n")
    # The end of a turn in this template ends an answer, the end in another's does not.
    assert tokenizer.chat_stop_ids == set(own.convert_tokens_to_ids([EOS, "<|im_end|>"]))
    other = Tokenizer(found, "llama-2")
    assert own.decode(other.chat(ASK)) == f"{EOS}[INST] Who are you? [/INST]"  # its <s> is its <eos>
    assert other.chat_stop_ids == {0}


def test_a_message_that_ends_is_not_always_the_turn() -> None:
    """In gpt-oss's format the answer comes after the reasoning's end."""
    assert turn_ends("<|user|>{{ text }}<|end|>") == ("<|end|>",)
    assert turn_ends("<|start|>assistant<|channel|>final<|message|>{{ text }}<|end|>") == ()


def test_bare_messages_are_continued(model: Path) -> None:
    tokenizer = Tokenizer(resolve_model(model), "bare")
    own = sentencepiece_style()
    ids = tokenizer.chat([Message("system", "# a"), Message("user", "b ="), Message("assistant", " 1"),
                          Message("user", "c")])
    assert ids[0] == own.bos_token_id
    assert ids[1:] == own("# a\nb =\n 1\nc", add_special_tokens=False)["input_ids"]


def test_a_template_from_a_file(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    found = resolve_model(model)
    expected = sentencepiece_style()("user: Who are you?\nassistant:", add_special_tokens=False)["input_ids"]
    assert Tokenizer(found, str(path)).chat(ASK) == expected
    for content, says in (("{{ raise_exception('no system') }}", "cannot be used for this chat: no system"),
                          ("{% for %}", "cannot be used for this chat: "),
                          ("{{ missing.thing }}", "cannot be used for this chat: 'missing' is undefined"),
                          ("", "gives no tokens for this chat")):
        path.write_text(content)
        with pytest.raises(UsageError, match=says) as caught:
            Tokenizer(found, str(path)).chat(BRIEF)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="no chat template 'alpaca'"):
        Tokenizer(found, "alpaca")
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        Tokenizer(found, str(path))


@pytest.mark.parametrize(("template", "names"), [
    ("{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
     {"enable_thinking"}),
    ("A thinking model. {# thinking #}{{ turn.thinking }}{{ '<thinking>' + \"thinking '\" }}", {"turn"}),
    ("{%- set ns = namespace(on=thinking|default(false)) -%}", {"ns", "thinking"}),
    ("{{ a['thinking'] }}{{ 'it\\'s thinking' ~ b }}", {"a", "b"}), ("{{ a", set()), ("", set()),
])
def test_a_templates_variables(template: str, names: set[str]) -> None:
    found = variables_of(template)
    assert names <= found
    assert ("thinking" in found) == ("thinking" in names)


def test_the_variables_of_a_hostile_template_take_no_time() -> None:
    """In quadratic time, these would take minutes."""
    for template in ("{%" * 120_000, "{{ '" * 60_000 + "}}", "{{" + "'" * 240_001 + "}}", "{%%}" * 60_000):
        variables_of(template)
