"""``flowspec generate --cluster``: the service on this machine, behind a real sshd, and absent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kits import ssh_boards
from kits.error_lines import error_line
from kits.http_server import NAME, Running, running, served
from kits.plain_answers import plain_text, plain_tokens
from kits.services import free_port
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.cli.main import main
from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.sampling.rule import Sampling

PROMPT = "def f(x): return"
KEY = "a-secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2, hidden=32, vocab=97)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[ProcessCluster]:
    with open_cluster(ClusterSpec(model, 2, threads=1)) as made:
        made.generate(Request([1], "flowspec", 1))  # it is up, wherever its owner is later
        yield made


@pytest.fixture(scope="module")
def server(model: Path, cluster: ProcessCluster) -> Iterator[Running]:
    with running(served(model), cluster) as server:
        yield server


def described(path: Path, port: int) -> str:
    """A cluster file whose draft device is this machine."""
    path.write_text(f'[cluster]\nname = "here"\nserve_port = {port}\n'
                    '[[device]]\nname = "d0"\naddress = "127.0.0.1"\nrole = "draft"\n'
                    '[[device]]\nname = "v1"\naddress = "192.0.2.1"\nrole = "verify"\n')
    return str(path)


@pytest.fixture
def file(server: Running, tmp_path: Path) -> str:
    return described(tmp_path / "cluster.toml", urlsplit(server.url).port or 0)


def generate(file: str, *arguments: str) -> int:
    return main(["generate", "--cluster", file, "--max-new-tokens", "12", *arguments])


@ssh_boards.needs_boards
def test_over_ssh(model: Path, cluster: ProcessCluster, tmp_path: Path,
                  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The service listens on the loopback of its board, in a network of its own, and wants a key.  The first
    test: there is one cluster, and no other test may own it meanwhile."""
    with ssh_boards.boards(1, tmp_path) as boards:
        port = free_port()
        text = boards.file.read_text()
        file = str(boards.file)
        boards.file.write_text(text.replace("[cluster]\n", f"[cluster]\nserve_port = {port}\n"))
        with boards.bed.entered(boards.outside):
            assert generate(file, PROMPT) == 1
            assert "no draft service answers on board-0, port" in capsys.readouterr().err
        with boards.bed.entered(0), running(served(model), cluster, api_key=KEY, port=port), \
                boards.bed.entered(boards.outside):
            assert generate(file, PROMPT) == 2
            assert "set FLOWSPEC_API_KEY to it" in capsys.readouterr().err
            monkeypatch.setenv("FLOWSPEC_API_KEY", KEY)
            assert generate(file, PROMPT, "--json") == 0
            told = json.loads(capsys.readouterr().out)
            boards.file.write_text(boards.file.read_text().replace("ssh_user", "ssh_port = 2\nssh_user", 1))
            assert generate(file, PROMPT) == 1
            assert "port 2: Connection refused" in capsys.readouterr().err
    assert told["text"] == plain_text(model, PROMPT, 12)


def test_tokens_are_plain_decodings(model: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(file, PROMPT, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tokens"], told["text"]) == (plain_tokens(model, PROMPT, 12), plain_text(model, PROMPT, 12))
    assert (told["finish_reason"], told["strategy"], told["model"], told["cluster"], told["clock"]) == (
        "length", "flowspec", NAME, "here", "wall")
    assert told["stats"]["turns"] > 0
    assert told["sampling"]["temperature"] == {"value": 0.0, "from": "the service"}
    assert generate(file, PROMPT, "--strategy", "chunk_pp") == 0
    out, err = capsys.readouterr()
    assert out == told["text"] + "\n"
    assert err.startswith(f"[chunk_pp, {NAME} on here, 2 stages: 12 tokens (length), ")


def test_sampling_is_that_of_a_run_here(model: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(file, PROMPT, "--json", "--temperature", "1", "--top-p", "0.9", "--seed", "3") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] == plain_tokens(model, PROMPT, 12, Sampling(temperature=1.0, top_p=0.9, seed=3))
    assert told["sampling"]["seed"] == {"value": 3, "from": "command line"}


def test_the_service_gets_the_answers_schema(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                             ) -> None:
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [7]}')
    for question in ((), ("--chat",)):
        assert generate(file, PROMPT, *question, "--json-schema", str(schema)) == 0
        out, err = capsys.readouterr()
        assert (out.strip(), "(stop)" in err) == ("7", True)


def test_errors_of_the_service_are_shown(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["generate", "--cluster", file, PROMPT, "--max-new-tokens", "100000"])
    assert "d0: the model's context is" in error_line(capsys, code)


def test_an_absent_service_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = described(tmp_path / "c.toml", free_port())
    assert generate(file, PROMPT) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no draft service answers on d0, port" in err
    assert "flowspec deploy status" in err
