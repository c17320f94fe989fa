"""Token ids and figures, for who asks for them; OpenAI's client reads the rest as ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.http_server import NAME, Running, ask, running, served

from flowspec_edge.drivers.processes.process_cluster import ProcessCluster

WANTED = {"flowspec": {"tokens": True}}


@pytest.fixture(scope="module")
def server(model: Path, processes: ProcessCluster) -> Iterator[Running]:
    with running(served(model), processes) as it:
        yield it


def test_tokens_and_figures_come_with_the_answer(server: Running) -> None:
    plain = ask(server, "abc", max_tokens=8)
    whole = ask(server, "abc", max_tokens=8, extra_body=WANTED)
    assert plain.choices[0].text == whole.choices[0].text
    assert not {"tokens", "stats"} & {*plain.model_extra["flowspec"]}
    details = whole.model_extra["flowspec"]
    assert len(details["tokens"]) == whole.usage.completion_tokens == 8
    assert details["stats"]["turns"] > 0
    assert len(details["stats"]["stages"]) == 2

    chunks = [*ask(server, "abc", max_tokens=8, stream=True, extra_body=WANTED)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert [bool(chunk.model_extra) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].model_extra["flowspec"]["tokens"] == details["tokens"]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_up_to_a_stop_string_and_in_a_chat(server: Running) -> None:
    text = ask(server, "abc", max_tokens=24).choices[0].text
    stopped = ask(server, "abc", max_tokens=24, stop=text[5:7], extra_body=WANTED)
    details = stopped.model_extra["flowspec"]
    assert len(details["tokens"]) == stopped.usage.completion_tokens < 24
    assert details["stats"] is None
    chat = server.client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hello"}], max_tokens=4, extra_body=WANTED)
    assert len((chat.model_extra or {})["flowspec"]["tokens"]) == 4
