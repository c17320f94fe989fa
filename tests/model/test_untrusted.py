"""Processes with limits: what exceeds them ends alone; templates are rendered as transformers does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.hypothesis_examples import examples
from kits.process_clusters import until
from kits.small_tokenizers import sentencepiece_style

from flowspec_edge.errors import UsageError
from flowspec_edge.model.untrusted.processes import (
    JobCancelled,
    LimitedProcesses,
    LimitExceeded,
    Limits,
    TemplateRenderer,
    cancelled_by,
)

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Où?\n<b> 'x' "},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {
            "name": "f", "arguments": {"b": 1, "a": [None, True, 1e300, "é"]}}}]},
        {"role": "tool", "content": "{}", "tool_call_id": "1"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer()
    yield made
    made.close()


def processes(pool: LimitedProcesses) -> list[int]:
    return [process._process.pid for process in pool._all]


def ended(pid: int) -> bool:
    """Also before its exit code has been asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


PIECES = [
    "text\n", "  {% if tools %}", "{% else %}", "{% endif %}\n", "{% for m in messages %}\n",
    "{%- endfor -%} ", "{{ m.role }}", "{{ m['content'] | trim }}", "{{ messages | tojson }}",
    "{{ tools | tojson(indent=2) }}",
    "{{ m.tool_calls[0].function.arguments | tojson(sort_keys=true, ensure_ascii=true) }}",
    "{{ bos_token ~ eos_token }}", "{{ nothing }}", "{{ nothing.at_all }}", "{% break %}", "{% continue %}",
    "{% generation %}{{ m.content }}{% endgeneration %}", "{% set x = loop.index0 %}", "{{ x }}",
    "{% set ns = namespace(a=1) %}", "{% set ns.a = ns.a + 1 %}{{ ns.a }}",
    "{{ strftime_now('%Y-%m-%d') }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ documents }}",
    "{{ add_generation_prompt }}", "{{ messages.append(1) }}", "{{ ''.__class__ }}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}", "{{ m.items() | list }}",
    "{{ '<b>' | e }}", "{{ messages[1:] | map(attribute='role') | join(',') }}", "{# c #}\n",
    "{{ range(3) | list }}", "{{ messages[::-1][0]['role'] }}", "{{ 'a b'.split() }}", "{{ m is mapping }}",
    "{{ {",
]


@examples(2000, quick=90)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=9))
def test_texts_are_those_of_transformers(renderer: TemplateRenderer, pieces: list[str]) -> None:
    template, tokenizer = "".join(pieces), sentencepiece_style()
    try:
        theirs = tokenizer.apply_chat_template(CHAT, TOOLS, chat_template=template, tokenize=False,
                                               add_generation_prompt=True)
    except Exception:
        theirs = None
    try:
        ours = renderer.render(template, tokenizer.special_tokens_map, CHAT, TOOLS, True)
    except UsageError:
        ours = None
    assert ours == theirs


@pytest.mark.parametrize("template", [
    ENDLESS, "{{ 'x' * 10 ** 10 }}", "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"])
def test_a_job_beyond_its_limits_ends_alone(template: str) -> None:
    small = LimitedProcesses("template", Limits(cpu_s=0.3, memory=64 * 2**20, stack=2**23))
    with ThreadPoolExecutor(1) as other:
        refused = other.submit(small.run, {"template": template, "context": {}})
        assert small.run({"template": "{{ a }}", "context": {"a": 4}}) == "4"
        with pytest.raises(LimitExceeded):
            refused.result()
    assert small.run({"template": "{{ a }}", "context": {"a": 5}}) == "5"
    small.close()


def test_a_process_that_was_killed_is_replaced(renderer: TemplateRenderer) -> None:
    renderer.render("a", {}, CHAT)
    for pid in processes(renderer):
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: ended(pid))  # type: ignore[misc]
    assert renderer.render("b", {}, CHAT) == "b"


def test_a_cancelled_job_ends_its_process(renderer: TemplateRenderer) -> None:
    renderer.render("a", {}, CHAT)
    event = threading.Event()

    def job() -> str:
        with cancelled_by(event):
            return renderer.run({"template": ENDLESS, "context": {}})

    with ThreadPoolExecutor(1) as other:
        running = other.submit(job)
        until(lambda: len(renderer._all) > len(renderer._idle))
        pids = processes(renderer)
        event.set()
        with pytest.raises(JobCancelled):
            running.result()
    assert any(ended(pid) for pid in pids)


@pytest.mark.parametrize("template", ["a", ENDLESS])
def test_processes_end_with_their_owner(template: str) -> None:
    """Even if it is killed, idle or at work."""
    program = ("import sys, threading\n"
               "from flowspec_edge.model.untrusted.processes import TemplateRenderer\n"
               "renderer = TemplateRenderer()\n"
               "renderer.render('a', {}, [])\n"
               "print(*[process._process.pid for process in renderer._all], flush=True)\n"
               "renderer.render(sys.argv[1], {}, [])\n"
               "threading.Event().wait()\n")
    with subprocess.Popen([sys.executable, "-c", program, template], stdout=subprocess.PIPE,
                          text=True) as owner:
        assert owner.stdout is not None
        pids: list[Any] = owner.stdout.readline().split()
        assert pids
        owner.kill()
    until(lambda: all(ended(int(pid)) for pid in pids))
