"""``flowspec generate --chat``, and sampling defaults of generation_config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from kits.plain_answers import tokenizer_of
from kits.small_tokenizers import save, sentencepiece_style
from kits.tiny_model_dir import tiny_model_dir
from kits.transformers_generate import reference_text
from safetensors.torch import load_file, save_file

from flowspec_edge.cli.main import main
from flowspec_edge.sampling.rule import Sampling

QUESTION = "Who are you?"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It says pieces of words only: no special tokens, and no bytes, which seldom make characters."""
    path = tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny", layers=2, hidden=32, vocab=400)
    save(sentencepiece_style(), path / "target")
    tensors = load_file(path / "target" / "model.safetensors")
    tensors["lm_head.weight"][:259] = 0
    tensors["lm_head.weight"][len(sentencepiece_style()):] = 0
    save_file(tensors, path / "target" / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def generate(model: Path, *arguments: str) -> int:
    return main(["generate", "--model", str(model), "--clock", "virtual", "--stages", "2", "--strategy",
                 "autoregressive", "--max-new-tokens", "6", *arguments])


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def expected(model: Path, prompt: str, special: bool = True) -> tuple[list[int], str]:
    """transformers' answer to a prompt as it is written, and its text. ``special``: with the tokenizer's own
    special tokens, which a Jinja template writes itself."""
    tokenizer = tokenizer_of(model)
    ids = tokenizer(prompt, add_special_tokens=special)["input_ids"]
    new, _ = reference_text(model, ids, Sampling(), 6, [], ends=[])
    return new, tokenizer.decode(new, skip_special_tokens=True)


def test_a_question_goes_into_the_template(model: Path, tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    vicuna = model.rename(tmp_path / "vicuna-tiny")
    (tmp_path / "question.txt").write_text(QUESTION)
    reference = expected(vicuna, f"Be brief. USER: {QUESTION} ASSISTANT:")
    for question in ([QUESTION], ["--prompt-file", str(tmp_path / "question.txt")]):
        assert generate(vicuna, "--chat", *question, "--system", "Be brief.", "--json") == 0
        answer = result(capsys)
        assert (answer["tokens"], answer["text"]) == reference
    assert generate(vicuna, "--chat", QUESTION, "--system", "Be brief.") == 0
    assert capsys.readouterr().out == reference[1] + "\n"


def test_another_template_and_its_stop_token(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer ends at </s>, although this model's own files call token 0 the end."""
    new, text = expected(model, f"[INST] {QUESTION} [/INST]")
    assert generate(model, "--chat", QUESTION, "--chat-template", "llama-2", "--json") == 0
    answer = result(capsys)
    assert (answer["tokens"], answer["text"], answer["finish_reason"]) == (new, text, "length")
    path = model / "target" / "tokenizer_config.json"
    end = tokenizer_of(model).convert_ids_to_tokens(new[3])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": end}))
    assert generate(model, "--chat", QUESTION, "--chat-template", "llama-2", "--json") == 0
    answer = result(capsys)
    assert (answer["tokens"], answer["finish_reason"]) == (new[: new.index(new[3])], "stop")


def test_a_continuation_begins_with_its_space(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt and answer side by side are the text of both; the stream says the same as the JSON."""
    new, _ = expected(model, "in the")
    tokenizer = tokenizer_of(model)
    assert generate(model, "in the", "--json") == 0
    text = result(capsys)["text"]
    assert f"in the{text}" == tokenizer.decode([*tokenizer("in the")["input_ids"], *new],
                                               skip_special_tokens=True)
    assert generate(model, "in the") == 0
    assert capsys.readouterr().out == f"{text}\n"


def test_sampling_is_the_models_where_none_is_given(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model / "target" / "generation_config.json"
    advice = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    path.write_text(json.dumps(json.loads(path.read_text()) | advice))
    assert generate(model, "in the", "--json", "--seed", "3", "--top-p", "0.5") == 0
    out, err = capsys.readouterr()
    drawn = json.loads(out)
    assert drawn["sampling"] == {
        "temperature": {"value": 0.6, "from": "generation_config.json"},
        "top_k": {"value": 0, "from": "default"},
        "min_p": {"value": 0.0, "from": "default"},
        "top_p": {"value": 0.5, "from": "command line"},
        "seed": {"value": 3, "from": "command line"},
    }
    assert err == "flowspec: note: tiny asks for options that are not applied here: repetition_penalty 1.1\n"
    assert generate(model, "in the", "--seed", "3", "--top-p", "0.5") == 0
    out, err = capsys.readouterr()
    assert out == drawn["text"] + "\n"
    assert "; temperature 0.6 from generation_config.json, top-p 0.5, seed 3]" in err
    path.unlink()  # the same, all of it asked for
    assert generate(model, "in the", "--json", "--seed", "3", "--top-p", "0.5", "--temperature", "0.6") == 0
    assert result(capsys)["tokens"] == drawn["tokens"]


def test_temperature_0_is_greedy_whatever_the_model_says(model: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    reference = expected(model, "in the")[0]
    path = model / "target" / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 5.0}))
    assert generate(model, "in the", "--json", "--temperature", "0") == 0
    assert result(capsys)["tokens"] == reference


def test_variables_of_the_template(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Qwen3 is told not to think; what the template does not read is said."""
    template = tmp_path / "thinks.jinja"
    template.write_text("{{ messages[0].content }}{% if enable_thinking is false %}!{% endif %}")
    chat = ("--chat", QUESTION, "--chat-template", str(template), "--json", "--chat-template-kwargs")
    assert generate(model, *chat, '{"enable_thinking": false, "budget": 1}') == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tokens"] == expected(model, QUESTION + "!", special=False)[0]
    assert captured.err == "flowspec: note: the chat template of tiny does not read budget\n"
