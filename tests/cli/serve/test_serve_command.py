"""``flowspec serve`` as a process: its line, its log, its end; and contexts that it cannot hold."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx2
import pytest
from kits.error_lines import error_line
from kits.network_beds import heed_ctrl_c
from kits.plain_answers import plain_text
from kits.process_clusters import PATIENCE, alive, until
from kits.rail_files import board, once_measured
from kits.sharded_models import cut
from kits.tiny_model_dir import tiny_model_dir
from openai import BadRequestError, OpenAI
from openai.types import Completion

from flowspec_edge.cli.common.options import require_room
from flowspec_edge.cli.main import main
from flowspec_edge.model.opened import OpenModel
from tests.chaos.processes import descendants

PROMPT = "def f(x): return"
WATTS = 12.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2, hidden=32, vocab=97)


@contextmanager
def started(model: Path, temporary: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command, which keeps what it makes on disk below ``temporary``."""
    command = [sys.executable, "-m", "flowspec_edge.cli.main", "serve", "--model", str(model),
               "--name", "tiny", "--stages", "2", "--port", "0", *arguments]
    with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
            preexec_fn=heed_ctrl_c) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_it_serves_logs_and_leaves_nothing_behind(
        model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, number: signal.Signals,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWSPEC_SYSFS", str(board(tmp_path_factory.mktemp("board"), WATTS)))
    with started(model, tmp_path, "--log-json", "--api-key", "key", "--context", "1800",
                 "--scheduling-policy", "fcfs") as process:
        line = line_of(process.stdout)
        found = re.fullmatch(r"flowspec: serving tiny \(flowspec_plus, 2 stages, fp32\) at "
                             r"(http://127.0.0.1:\d+)/v1, the page at \1/\n", line)
        assert found, line
        if (os.cpu_count() or 1) < 3:
            assert "--strategy autoregressive" in line_of(process.stdout)
        pids = descendants(process.pid)
        assert len(pids) >= 3  # the fork server and the stages
        with OpenAI(base_url=f"{found[1]}/v1", api_key="key") as client:
            answers: list[Completion] = []

            def ask() -> tuple[dict[str, Any], str]:
                answers.append(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12))
                line = json.loads(line_of(process.stderr))
                return line, httpx2.get(f"{found[1]}/metrics", headers={"authorization": "Bearer key"},
                                        timeout=PATIENCE).text

            logged, metrics = once_measured(
                ask, lambda told: told[0].get("energy_j") and "device_power_watts{" in told[1], tries=3)
            done = answers[-1]
            with pytest.raises(BadRequestError, match="context is 1800 tokens here"):
                client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1900)
            assert json.loads(line_of(process.stderr))["status"] == 400
            text = PROMPT + done.choices[0].text
            again = client.completions.create(model="tiny", prompt=text, max_tokens=2)
            assert again.usage is not None
            assert again.usage.prompt_tokens_details is not None
            cached = again.usage.prompt_tokens_details.cached_tokens
            assert len(PROMPT) <= (cached or 0) < len(text)  # a character is a token
            line_of(process.stderr)
            with client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1500,
                                           stream=True) as endless:
                next(iter(endless))
                process.send_signal(number)
                _, rest = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    until(lambda: not any(map(alive, pids)))  # helpers of multiprocessing end a moment later
    assert list(tmp_path.iterdir()) == []
    assert done.choices[0].text == plain_text(model, PROMPT, 12)
    assert (logged["event"], logged["id"], logged["status"], logged["completion_tokens"]) == \
           ("request", done.id, 200, 12)
    assert 'emulates="",model="tiny",stages="2",strategy="flowspec_plus"' in metrics
    assert f"flowspec_generated_tokens_total {12.0 * len(answers)}\n" in metrics
    assert done.usage is not None
    assert round(done.model_dump()["flowspec"]["energy_j"], 4) == logged["energy_j"] > 0
    assert f'flowspec_device_power_watts{{device="D0"}} {WATTS}' in metrics
    assert re.findall(r'^flowspec_device_energy_joules_total{device="(\w+)"}', metrics, re.M) == ["D0"]
    assert [json.loads(line)["error"] for line in rest.splitlines()] == ["the server is shutting down"]


@contextmanager
def serving(model: Path, temporary: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], OpenAI]]:
    with started(model, temporary, *arguments) as process:
        found = re.search(r"at (\S+/v1),", line_of(process.stdout))
        assert found
        with OpenAI(base_url=found[1], api_key="none", max_retries=0, timeout=PATIENCE) as client:
            yield process, client


def stages_of(process: subprocess.Popen[str]) -> tuple[int, list[int]]:
    """The process ids of the fork server and of the stages."""
    forks = {pid: descendants(pid) for pid in descendants(process.pid)}
    server = max(forks, key=lambda pid: len(forks[pid]))
    return server, sorted(forks[server])


@pytest.mark.slow
@pytest.mark.parametrize("recovering", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_one_signal_ends_it_although_devices_are_stopped(model: Path, tmp_path: Path,
                                                         recovering: bool) -> None:
    with serving(model, tmp_path) as (process, _):
        pids = descendants(process.pid)
        server, stages = stages_of(process)
        assert len(stages) == 2
        os.kill(server, signal.SIGSTOP)
        os.kill(stages[0], signal.SIGKILL if recovering else signal.SIGSTOP)
        while recovering and "restarting it" not in line_of(process.stderr):
            pass
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    until(lambda: not any(map(alive, pids)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_it_can_be_ended_while_the_cluster_starts(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with started(model, tmp_path, "--port", str(port)) as process:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE) as client:
            while True:
                assert process.poll() is None
                try:
                    status = client.get("/ready").status_code
                    break
                except httpx2.ConnectError:
                    continue
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert (status, out) == (503, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sharded", [False, True])
def test_a_context_beyond_the_memory_is_one_line(model: Path, tmp_path: Path, sharded: bool,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """For a model whose rows take a gigabyte each; the line says what fits, and what requests can use."""
    wide = tmp_path / "wide"
    if sharded:
        cut(model / "target", wide, 2, drafts=[model / "eagle2"])
        manifest = json.loads((wide / "manifest.json").read_text())
        manifest["parts"]["stage-1"]["row_bytes"] = 1 << 30
        (wide / "manifest.json").write_text(json.dumps(manifest))
    else:
        shutil.copytree(model, wide)
        config = json.loads((wide / "target/config.json").read_text()) | {
            "head_dim": 1 << 16, "num_key_value_heads": 512, "num_attention_heads": 512}
        (wide / "target/config.json").write_text(json.dumps(config))
    code = main(["serve", "--port", "0", "--model", str(wide), "--stages", "2", "--context", "1000000"])
    assert "--context 1000000" in error_line(capsys, code)


def test_a_context_beyond_the_positions_is_noted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = OpenModel(model)
    require_room(2 * found.max_positions, 2, 2 * found.max_positions, found, "fp32", local=True)
    assert capsys.readouterr().err == ""
    require_room(2 * found.max_positions + 1, 2, 2 * found.max_positions + 1, found, "fp32", local=True)
    err = capsys.readouterr().err
    assert err.startswith("flowspec: note: ")
    assert str(found.max_positions) in err
