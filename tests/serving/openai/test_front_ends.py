"""Front ends for OpenAI's API, unmodified, against the endpoint: ``make soak``, where they are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from kits.http_server import NAME, Running, running, served
from kits.process_clusters import until
from kits.services import free_port

from flowspec_edge.drivers.processes.process_cluster import ProcessCluster

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("default")]

TEMPLATE = """{% if tools %}{{ tools | tojson }} <tool_call></tool_call> {% endif %}\
{% for turn in messages %}{{ turn.role }}: {{ turn.content }}
{% endfor %}assistant: """
SCHEMA: dict[str, Any] = {
    "title": "weather", "description": "The weather of a city.", "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]},
                   "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"], "additionalProperties": False}
QUESTION = "Weather in Rome?"


@pytest.fixture(scope="module")
def server(model: Path, processes: ProcessCluster) -> Iterator[Running]:
    with running(served(model, TEMPLATE), processes) as it:
        yield it


def fits(answer: Any) -> bool:
    return answer["city"] in ("Rome", "Oslo") and 1 <= answer["days"] <= 9


def test_langchain(server: Running) -> None:
    ChatOpenAI = pytest.importorskip("langchain_openai").ChatOpenAI
    HumanMessage = pytest.importorskip("langchain_core.messages").HumanMessage
    reach: Any = {"model": NAME, "base_url": f"{server.url}/v1", "api_key": "none"}
    llm = ChatOpenAI(**reach, temperature=1, seed=3, max_tokens=300)
    short = ChatOpenAI(**reach, temperature=1, seed=3, max_tokens=12)
    whole = short.invoke(QUESTION)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] == 12
    assert "".join(chunk.content for chunk in short.stream(QUESTION)) == whole.content
    assert fits(llm.with_structured_output(SCHEMA).invoke(QUESTION))
    called = llm.bind_tools([SCHEMA], tool_choice="any", parallel_tool_calls=False)
    (call,) = called.invoke(QUESTION).tool_calls
    assert call["name"] == "weather"
    assert fits(call["args"])
    parts = [part for chunk in called.stream(QUESTION) for part in chunk.tool_call_chunks]
    assert json.loads("".join(part["args"] for part in parts)) == call["args"]
    several = ChatOpenAI(**reach, max_tokens=4, n=2).generate([[HumanMessage(QUESTION)]])
    assert len(several.generations[0]) == 2


def test_litellm(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it downloads one
    litellm = pytest.importorskip("litellm")

    def ask(**how: Any) -> Any:
        return litellm.completion(**{
            "model": f"openai/{NAME}", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 1,
            "messages": [{"role": "user", "content": QUESTION}], "seed": 3, "max_tokens": 300, **how})

    whole = ask(max_tokens=12)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens == 12
    text = "".join(chunk.choices[0].delta.content or "" for chunk in ask(max_tokens=12, stream=True))
    assert text == whole.choices[0].message.content
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    assert fits(json.loads(ask(response_format=wanted).choices[0].message.content))
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    called = ask(tools=[tool], tool_choice="required", parallel_tool_calls=False).choices[0]
    assert called.finish_reason == "tool_calls"
    assert fits(json.loads(called.message.tool_calls[0].function.arguments))
    assert len(ask(n=2, max_tokens=4).choices) == 2
    for provider in ("anthropic", "ollama_chat"):  # at the other doors, greedily: not all take a seed
        way: dict[str, Any] = {"model": f"{provider}/{NAME}", "api_base": server.url, "temperature": 0, "seed": None,
                               "max_tokens": 12}
        other = ask(**way).choices[0].message.content
        assert other == ask(temperature=0, max_tokens=12).choices[0].message.content
        assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True, **way)) == other


@pytest.fixture
def open_webui(server: Running, tmp_path: Path) -> Iterator[httpx2.Client]:
    """Open WebUI as a process, with the three settings of docs/guides/serving.md, and its first user logged in."""
    pytest.importorskip("open_webui")
    port = free_port()
    settings = {"OPENAI_API_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none",
                "ENABLE_OLLAMA_API": "false"}
    here = {"DATA_DIR": str(tmp_path), "OFFLINE_MODE": "true", "HF_HUB_OFFLINE": "1",
            "RAG_EMBEDDING_ENGINE": "openai", "WEBUI_SECRET_KEY": "secret"}
    code = f"from open_webui import app; app(['serve', '--host', '127.0.0.1', '--port', '{port}'])"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **here, **settings},
                                   cwd=tmp_path, stdout=log, stderr=log)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=300) as http:
            def is_up() -> bool:
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                with suppress(httpx2.TransportError):
                    return http.get("/health").status_code == 200
                return False

            until(is_up, 900.0)  # its start takes a minute or more
            user = {"name": "a", "email": "a@example.com", "password": "a-password"}
            token = http.post("/api/v1/auths/signup", json=user).raise_for_status().json()["token"]
            http.headers["Authorization"] = f"Bearer {token}"
            yield http
    finally:
        process.terminate()
        process.wait(60)


def test_open_webui(open_webui: httpx2.Client) -> None:
    models = open_webui.get("/api/models").raise_for_status().json()["data"]
    assert NAME in [model["id"] for model in models]
    asked = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12}
    whole = open_webui.post("/api/chat/completions", json={**asked, "stream": False}).raise_for_status()
    text = whole.json()["choices"][0]["message"]["content"]
    assert text
    lines = open_webui.post("/api/chat/completions", json={**asked, "stream": True}).raise_for_status().text
    events = [line.removeprefix("data: ") for line in lines.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks
                   if chunk["choices"]) == text
