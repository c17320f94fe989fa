"""Prompt files and tasks: formats, names, categories as Spec-Bench groups them, limits, errors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from flowspec_edge.errors import UsageError
from flowspec_edge.lab.bench.tasks import MT_BENCH, load_prompts, load_tasks, task_name
from flowspec_edge.util.resources import resource_dir


def write(path: Path, *lines: dict[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def spec_bench(path: Path) -> Path:
    """A file of Spec-Bench's shape: two questions of MT-bench's categories, then one of each other."""
    lines = [{"question_id": 81 + i, "category": category, "turns": [f"{category} {i}", "and then?"]}
             for i, category in enumerate(sorted(MT_BENCH) * 2)]
    others = ("translation", "summarization", "qa", "math_reasoning", "rag")
    lines += [{"question_id": 200 + i, "category": c, "turns": [f"one {c}"]} for i, c in enumerate(others)]
    return write(path, *lines)


def test_prompt_or_first_turn(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question_id": 81, "category": "writing", "turns": ["one", "two"]}\n\n'
                    '{"prompt": "three\\n"}\n{"prompt": "four"}\n')
    first, second = load_prompts(path, limit=2)
    assert (first.id, first.category, first.text) == ("81", "writing", "one")
    assert (second.id, second.text) == ("3", "three\n")
    assert len(load_prompts(path)) == 3


def test_the_demos_prompts() -> None:
    prompts = load_prompts(resource_dir("models") / "demo" / "prompts.jsonl")
    assert len(prompts) == len({p.text for p in prompts}) == len({p.id for p in prompts}) == 64
    assert len({p.category for p in prompts}) >= 10
    assert all(100 < len(p.text) < 400 for p in prompts)


@pytest.mark.parametrize(("line", "says"), [
    ("{", "p.jsonl:2 is not valid JSON"),
    ("[1]", "p.jsonl:2: not a JSON object"),
    ('{"turns": []}', "p.jsonl:2: neither a prompt nor turns"),
    ('{"prompt": 3}', "p.jsonl:2: neither a prompt nor turns"),
    ('{"prompt": ""}', "p.jsonl:2: neither a prompt nor turns"),
])
def test_errors_name_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UsageError, match=says):
        load_prompts(path)
    assert len(load_prompts(path, limit=1)) == 1


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="has no prompts"):
        load_prompts(tmp_path / "empty.jsonl")


def test_a_file_is_a_task_called_after_its_stem_or_its_directory(tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    gsm = write(tmp_path / "gsm8k.jsonl", {"prompt": "1 + 1"}, {"prompt": "2 + 2"})
    mt = write(tmp_path / "mt_bench" / "question.jsonl", {"turns": ["write", "again"], "category": "writing"})
    first, second = load_tasks([gsm, mt])
    assert (first.name, [p.text for p in first.prompts]) == ("gsm8k", ["1 + 1", "2 + 2"])
    assert (second.name, [p.text for p in second.prompts]) == ("mt_bench", ["write"])
    monkeypatch.chdir(mt.parent)
    assert task_name(Path("question.jsonl")) == "mt_bench"


def test_spec_benchs_categories_are_its_six_tasks(tmp_path: Path) -> None:
    tasks = load_tasks([spec_bench(tmp_path / "question.jsonl")], by_category=True)
    assert [(t.name, len(t.prompts)) for t in tasks] == [
        ("mt_bench", 16), ("translation", 1), ("summarization", 1), ("qa", 1), ("math_reasoning", 1),
        ("rag", 1)]
    assert {p.category for p in tasks[0].prompts} == MT_BENCH


def test_a_single_category_is_left_alone(tmp_path: Path) -> None:
    maths = write(tmp_path / "gsm8k.jsonl", {"turns": ["1 + 1"], "category": "math"})
    code = write(tmp_path / "humaneval.jsonl", {"turns": ["def f"], "category": "code"},
                 {"turns": ["def g"], "category": "sql"})
    tasks = load_tasks([maths, code], by_category=True)
    assert [task.name for task in tasks] == ["math", "code", "sql"]


def test_limit_counts_in_each_task(tmp_path: Path) -> None:
    tasks = load_tasks([spec_bench(tmp_path / "question.jsonl")], by_category=True, limit=3)
    assert [len(task.prompts) for task in tasks] == [3, 1, 1, 1, 1, 1]
    files = [write(tmp_path / f"{n}.jsonl", *({"prompt": f"{n} {i}"} for i in range(4))) for n in "ab"]
    texts = [[p.text for p in task.prompts] for task in load_tasks(files, limit=2)]
    assert texts == [["a 0", "a 1"], ["b 0", "b 1"]]


def test_the_digest_is_that_of_the_texts(tmp_path: Path) -> None:
    one = load_tasks([write(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "é"})])[0]
    same = load_tasks([write(tmp_path / "b.jsonl", {"turns": ["x"], "question_id": 7}, {"prompt": "é"})])[0]
    less = load_tasks([tmp_path / "a.jsonl"], limit=1)[0]
    assert one.digest == same.digest == hashlib.sha256(b'["x", "\\u00e9"]').hexdigest()
    assert less.digest != one.digest


def test_errors(tmp_path: Path) -> None:
    a, b = (write(tmp_path / d / "p.jsonl", {"prompt": "x"}) for d in ("a", "b"))
    with pytest.raises(UsageError, match=r"a/p\.jsonl and .*b/p\.jsonl would both be the task 'p'"):
        load_tasks([a, b])
    bare = write(tmp_path / "c.jsonl", {"prompt": "x", "category": "qa"}, {"question_id": 9, "prompt": "y",
                                                                          "category": ""})
    with pytest.raises(UsageError, match=r"c\.jsonl: prompt 9 has no category"):
        load_tasks([bare], by_category=True)
