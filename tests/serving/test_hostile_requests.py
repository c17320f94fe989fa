"""Hostile schemas and templates over HTTP: an error for their client, and nothing for the others."""

from __future__ import annotations

import json
import select
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from kits.http_server import NAME, Held, ask, post, running, served
from kits.json_schemas import chain, hostile_schemas
from kits.process_clusters import until

from flowspec_edge.model.untrusted.processes import LimitedProcesses

# Each takes all of the CPU time that there is for one.
SLOW = [{"type": "integer", "multipleOf": 9999991 - 2 * i} for i in range(30)]
ORDINARY = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
            "additionalProperties": False}


def wanting(schema: dict[str, Any]) -> dict[str, Any]:
    """Fields of a body."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def refused(call: Callable[[], Any]) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("schema", [{"type": "integer", "multipleOf": 9999991}, chain("", 2577),
                                    chain("items", 1025), {"const": "x" * 1_900_000}])
def test_a_hostile_schema_is_its_clients_error(held: Held, model: Path, schema: dict[str, Any]) -> None:
    with running(served(model), held) as server:
        assert refused(lambda: ask(server, "x", extra_body=wanting(schema))).param == "response_format"
        assert ask(server, "x").usage.completion_tokens == 6
        assert ask(server, "x", extra_body=wanting(ORDINARY), max_tokens=60)


def test_tools_pass_the_same_gate(held: Held, model: Path) -> None:
    with running(served(model, "{# tools <tool_call> #}{{ messages[0].content }}"), held) as server:
        def call(parameters: dict[str, Any], **more: Any) -> Any:
            function = {"name": "f", "parameters": parameters}
            return server.client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "x"}], max_tokens=3,
                tools=[{"type": "function", "function": function}], **more)

        for schema in ({"properties": {"a": {"type": "integer", "multipleOf": 9999991}}},
                       {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain("", 2577)["$defs"]}):
            assert refused(lambda schema=schema: call(schema)).param == "tools"  # type: ignore[misc]
        assert refused(lambda: call(ORDINARY, extra_body=wanting(chain("", 2577)))).param == "tools"
        assert call(ORDINARY).choices


@pytest.mark.parametrize("template", [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 1 / 0 }}",
    "{{ 10.0 ** 1000 }}", "{{ 'x' * 10 ** 10 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ '\\ud800' }}", "{{ messages * 10 ** 8 }}", "{{ raise_exception('x' * 10 ** 6) }}",
])
def test_a_hostile_template_is_an_error_of_each_chat(held: Held, model: Path, template: str) -> None:
    with running(served(model, template), held) as server:
        error = refused(lambda: server.client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "x"}]))
        assert error.param == "messages"
        assert ask(server, "x").usage.completion_tokens == 6


@pytest.mark.slow
def test_other_clients_do_not_wait_for_slow_schemas(held: Held, model: Path) -> None:
    with running(served(model), held) as server:
        ask(server, "x", extra_body=wanting(ORDINARY), max_tokens=60)
        slow = [post(server, {"prompt": "x", "user": f"hostile {i % 3}", **wanting(schema)})
                for i, schema in enumerate(SLOW)]
        assert ask(server, "x").usage.completion_tokens == 6
        assert ask(server, "x", extra_body=wanting(ORDINARY), max_tokens=60)  # known
        assert len(select.select(slow, [], [], 0)[0]) < len(slow)
        for connection in slow:
            connection.close()
        assert ask(server, "x", extra_body=wanting({"type": "array", "items": ORDINARY}), max_tokens=20)


def test_a_client_that_goes_ends_its_job(held: Held, model: Path) -> None:
    what = served(model)
    with running(what, held) as server:
        processes: LimitedProcesses = what.tokenizer.grammars._processes
        ask(server, "x", extra_body=wanting(ORDINARY), max_tokens=60)
        connection = post(server, {"prompt": "x", **wanting(SLOW[0])})
        until(lambda: len(processes._all) > len(processes._idle))
        working = processes._all - set(processes._idle)
        connection.close()
        server.records.wait(499)
        until(lambda: not working & processes._all)
        assert ask(server, "x", extra_body=wanting(ORDINARY), max_tokens=60)


@pytest.mark.slow
@pytest.mark.parametrize("count", [33, pytest.param(1000, marks=pytest.mark.soak)])
def test_many_hostile_schemas(held: Held, model: Path, count: int) -> None:
    """Four at a time; each is answered with 200, 400 or 413, and the server serves on."""
    with running(served(model), held) as server, ThreadPoolExecutor(4) as pool:
        def status(item: tuple[int, tuple[str, dict[str, Any]]]) -> int:
            number, (_, schema) = item
            data = json.dumps({"model": NAME, "prompt": "x", "max_tokens": 8, "user": f"u{number % 5}",
                               **wanting(schema)})
            answer = server.http.post("/v1/completions", content=data, timeout=120,
                                      headers={"Content-Type": "application/json"})
            held.forget()  # they hold their grammars
            return int(answer.status_code)

        found = list(pool.map(status, enumerate(hostile_schemas(count))))
        assert set(found) <= {200, 400, 413}
        assert 200 in found
        assert ask(server, "x").usage.completion_tokens == 6
