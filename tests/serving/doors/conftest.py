"""A server whose chat template has tools and reasoning, and whose answers a test may choose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.http_server import Running, Says, running, served

from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.serving.openai.prepare import ServedModel

TEMPLATE = """{% if tools %}{{ tools | tojson }} <tool_call></tool_call> {% endif %}\
{% for turn in messages %}{{ turn.role }}: {% if turn.reasoning_content %}<think>{{ turn.reasoning_content }}\
</think>{% endif %}{{ turn.content }}{% for call in turn.tool_calls or [] %}{{ call.function.name }}\
({{ call.function.arguments | tojson }}){% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking is defined and \
enable_thinking is false %}<think></think>{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def what(model: Path) -> ServedModel:
    pytest.importorskip("llguidance")
    return served(model, TEMPLATE)


@pytest.fixture(scope="module")
def cluster(processes: ProcessCluster, what: ServedModel) -> Says:
    return Says(processes, what.tokenizer)


@pytest.fixture(scope="module")
def server(what: ServedModel, cluster: Says) -> Iterator[Running]:
    with running(what, cluster) as it:
        yield it


@pytest.fixture(autouse=True)
def own_words(cluster: Says) -> Iterator[None]:
    """The model's own, unless the test says others."""
    yield
    cluster.text = None
