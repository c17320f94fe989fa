"""Training text from the user's files: every format, every error, and what is held out."""

import json

import numpy as np
import pytest
import torch
from kits.tiny_models import tiny_tokenizer

from flowspec_edge.errors import UsageError
from flowspec_edge.lab.training.data_files import data_files
from flowspec_edge.lab.training.text_files import digest, documents, prepare_files, split

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
            "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(300)


@pytest.fixture(scope="module")
def chatty():
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def texts(path, tokenizer):
    return [document.text for document in documents(data_files([path]), tokenizer)]


CHAT = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(("row", "plain", "templated"), [
    ({"text": "x\u2028y", "prompt": "z"}, "x\u2028y", "x\u2028y"),
    ({"prompt": "def f("}, "def f(", "def f("),
    ({"prompt": "def f(", "completion": "x):"}, "def f(x):", "def f(x):"),
    ({"prompt": "a?", "answer": "b"}, "a?\nb", "<eos>[user]a?[assistant]b"),
    ({"prompt": "a?", "answer": None, "completion": "b"}, "a?b", "a?b"),
    ({"messages": CHAT}, "a?\nb", "<eos>[user]a?[assistant]b"),
])
def test_a_line_of_json_is_one_text(tmp_path, tokenizer, chatty, row, plain, templated):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert texts(path, tokenizer) == [plain]
    assert texts(path, chatty) == [templated]


@pytest.mark.parametrize(("row", "problem"), [
    ("{", r"it is not JSON \(.*\)"),
    ("[1]", "it is not an object"),
    ({"question": "?"}, 'it has none of the keys "text", "prompt" and "messages"'),
    ({"answer": "b"}, 'it has none of the keys "text", "prompt" and "messages"'),
    ({"text": 3}, '"text" must be a string'),
    ({"prompt": "a", "completion": ["b"]}, '"completion" must be a string'),
    ({"messages": []}, '"messages" must be a list of objects'),
    ({"messages": [{"role": "user"}]}, '"messages" must be a list of objects'),
    ({"messages": [{"role": "tool", "content": ""}]}, r"chat template refuses it \(no tools\)"),
    ('{"text": "\\ud800"}', "half of a surrogate pair"),
])
def test_an_unusable_line_is_named(tmp_path, chatty, row, problem):
    path = write(tmp_path / "data.jsonl", {"text": "fine"}, row)
    with pytest.raises(UsageError, match=rf"data\.jsonl, line 2: .*{problem}"):
        texts(path, chatty)


def test_directories_are_searched_and_duplicates_dropped(tmp_path, tokenizer):
    for name, text in {"a.txt": "one", "b/c.md": "two", "b/d.py": "one", "b/__init__.py": "", "b/e.bin": "no",
                       ".git/f.txt": "no", "b/.g.txt": "no", "h.jsonl": '{"text": "three"}'}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert texts(tmp_path, tokenizer) == ["one", "two", "three"]
    assert [f.name for f in data_files([tmp_path / "b" / "e.bin", tmp_path / "b"])] == [
        "e.bin", "__init__.py", "c.md", "d.py"]  # a file that is named is taken whatever it is called


def test_missing_and_unusable_files_are_one_line(tmp_path, tokenizer):
    with pytest.raises(UsageError, match=r"nothing\.txt"):
        data_files([tmp_path / "nothing.txt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty .*\.jsonl"):
        data_files([tmp_path / "empty"])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match=r"latin\.txt .*byte 3"):
        texts(tmp_path / "latin.txt", tokenizer)
    with (tmp_path / "endless.txt").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=r"endless\.txt"):
        texts(tmp_path / "endless.txt", tokenizer)
    for name, text in (("blank.txt", " \n"), ("short.txt", "a few words")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=rf"{name} .*\d+ tokens.* 65 .* 193 "):
            prepare_files(tmp_path / "work", [tmp_path / name], tokenizer, 0, 65, 193)


@pytest.mark.parametrize("wanted", [1, 5, 6, 7, 30, 54])
def test_held_out_text_is_not_trained_on_in_any_order(wanted):
    texts = [np.arange(10 * i, 10 * i + i) for i in range(1, 11)]  # 55 tokens, all different
    keys = [bytes([(7 * i) % 11]) for i in range(10)]
    train, held = split(texts, keys, wanted)
    assert len(held) == wanted
    assert sorted([*train, *held]) == sorted(np.concatenate(texts))
    backwards = split(texts[::-1], keys[::-1], wanted)
    assert np.array_equal(backwards[1], held)
    assert set(backwards[0]) == set(train)


def test_tokens_are_the_tokenizers_and_are_read_back(tmp_path, chatty):
    work = tmp_path / "work"
    work.mkdir()
    files = [write(tmp_path / "chat.jsonl", *({"messages": CHAT, "n": i} for i in range(3)),
                   *({"prompt": f"{i}?", "answer": "b" * 40} for i in range(20))),
             write(tmp_path / "text.txt", "naïve ✓ " * 60)]
    got = prepare_files(work, files, chatty, 0, 65, 100)
    wanted = [chatty.apply_chat_template(CHAT, tokenize=True, return_dict=False)]
    wanted += [chatty.encode(f"<eos>[user]{i}?[assistant]{'b' * 40}") for i in range(20)]
    wanted.append(chatty.encode(files[1].read_text()))
    tokens = torch.cat((got.train, got.held_out)).tolist()
    assert sorted(tokens) == sorted(token for ids in wanted for token in (*ids, 0))
    assert got.train.dtype == got.held_out.dtype == torch.int32
    assert len(got.held_out) == 100
    assert got.described == [f"2 file(s), {sum(f.stat().st_size for f in files)} bytes: chat.jsonl, text.txt"]
    stamp = (work / "text-train.npy").stat().st_mtime_ns
    again = prepare_files(work, files, chatty, 0, 65, 100)
    assert (work / "text-train.npy").stat().st_mtime_ns == stamp
    assert torch.equal(again.train, got.train)
    other = prepare_files(work, files[:1], chatty, 0, 65, 100)
    assert len(other.train) < len(got.train)


def test_the_digest_tells_contents_apart_and_not_names(tmp_path):
    a, b, c = (write(tmp_path / name, text) for name, text in (("a", "one"), ("b", "one"), ("c", "two")))
    assert digest([a, c]) == digest([b, c]) != digest([c, a])
