"""What keeps ``flowspec draft`` and a stage from starting; tests/chaos and whole boards have them as processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.services import Services
from kits.sharded_models import cut
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.cli.main import main


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2, hidden=32, vocab=97)
    out = tmp_path_factory.mktemp("cut") / "model"
    cut(whole, out)
    return out


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """What the command exits with, and its one line."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return code, err


@pytest.mark.parametrize(("changes", "says"), [
    ({"model": "nowhere"}, "no model 'nowhere'"),
    ({"strategy": "magic"}, "no strategy 'magic'"),
    ({"device": "gpu"}, "no torch device 'gpu': use cpu, cuda"),
    ({"device": "cuda:99"}, "no cuda:99 here: "),
    ({"host": "0.0.0.0"}, "others can reach 0.0.0.0"),
    ({"api_key_file": "/nowhere"}, "cannot read the API key /nowhere: No such file"),
    ({"api_key_file": "/dev/null"}, "/dev/null must hold an API key"),
    ({"worker_keys": ["x", "y"]}, "'x' is not a CURVE key"),
    ({"instances": ["v1"], "worker_keys": ["x"]}, "was sharded into 2 stages, not 1"),
])
def test_a_wrong_configuration_is_one_line(sharded: Path, tmp_path: Path, changes: dict[str, object],
                                           says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The unit is not started again after exit code 2."""
    services = Services(sharded, tmp_path, changes)
    code, err = failed(capsys, "draft", "--config", str(services.draft_file))
    assert (code, says in err) == (2, True), err


def test_links_beyond_loopback_without_keys_are_one_line(sharded: Path, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    services = Services(sharded, tmp_path, {"key_file": "", "worker_keys": [], "unencrypted": True,
                                            "control": "tcp://192.0.2.1:7701"})
    text = services.draft_file.read_text()
    services.draft_file.write_text(text.replace("unencrypted = true", "unencrypted = false"))
    code, err = failed(capsys, "draft", "--config", str(services.draft_file))
    assert code == 2
    assert "control: tcp://192.0.2.1:7701 is beyond loopback, where links have to be encrypted" in err


def test_a_key_file_elsewhere(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    services = Services(sharded, tmp_path)
    config = ["--config", str(services.draft_file), "--key-file", "/nowhere"]
    assert "cannot read the key file /nowhere" in failed(capsys, "draft", *config)[1]
    open_ = Services(sharded, tmp_path / "open", {"key_file": "", "worker_keys": []})
    code, err = failed(capsys, "draft", "--config", str(open_.draft_file), "--key-file", "/nowhere")
    assert (code, "its links are not encrypted" in err) == (2, True)


def test_an_api_key_elsewhere(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """systemd gives an empty credential where the board has no such file."""
    services = Services(sharded, tmp_path, {"host": "0.0.0.0", "api_key_file": "/etc/flowspec/api.key"})
    config = ["--config", str(services.draft_file), "--api-key-file"]
    (tmp_path / "empty").touch()
    assert failed(capsys, "draft", *config, str(tmp_path / "empty")) == (
        2, "flowspec: error: /etc/flowspec/api.key must hold an API key, of ASCII characters only\n")
    closed = Services(sharded, tmp_path / "closed", {"host": "0.0.0.0"})  # which asks for none
    assert "others can reach 0.0.0.0" in failed(
        capsys, "draft", "--config", str(closed.draft_file), "--api-key-file", str(tmp_path / "empty"))[1]


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A worker takes them for its process, which here is the tests' own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
def test_a_worker_whose_configuration_is_wrong(sharded: Path, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    services = Services(sharded, tmp_path)
    config = str(services.worker_files[0])
    assert failed(capsys, "worker", "--config", config, "--key-file", "/nowhere") == (
        2, "flowspec worker: cannot read the key file /nowhere: No such file or directory\n")
    assert failed(capsys, "worker", "--config", "nowhere.toml")[0] == 2
