"""``flowspec models shard``, ``inspect`` and ``verify``, on the command line, with a local hub."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from kits.hub_server import commit_of, hub
from kits.sharded_models import as_bin
from kits.tiny_model_dir import tiny_model_dir
from kits.tiny_models import tiny_llama

from flowspec_edge.cli.main import main
from flowspec_edge.messages import Open
from flowspec_edge.model.manifest import Manifest, PartFile
from flowspec_edge.sharding.job import Journal
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_shard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sharded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sharded") / "out"
    assert main(["models", "shard", "--model", str(model), "--split", "1,3", "--dtype", "int4",
                 "--group", "64", "--out", str(out)]) == 0
    return out


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that the command ends with."""
    capsys.readouterr()
    assert main(["models", *map(str, arguments)]) != 0
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    return said[0]


def test_inspect_says_what_stages_take(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["models", "inspect", str(sharded), "--context", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dtype"], found["compute_dtype"], found["quantisation"]["group"]) == ("int4", "bf16", 64)
    parts = {part["part"]: part for part in found["parts"]}
    assert list(parts) == ["stage-1", "stage-2", "draft"]
    for index, name in enumerate(("stage-1", "stage-2")):
        shard = load_shard(sharded, index, 2, "bf16")
        engine = StageEngine(shard)
        engine.open(Open(session=0, epoch=0, capacity=100))
        assert engine.cache_of(0) is not None
        assert parts[name]["layers"] == list(shard.layers)
        assert parts[name]["weight_bytes"] == shard.nbytes
        assert parts[name]["cache_bytes"] == engine.cache_bytes
        assert parts[name]["memory_bytes"] == shard.nbytes + engine.cache_bytes
        assert parts[name]["disk_bytes"] == sum(f.stat().st_size for f in (sharded / name).iterdir())
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert parts["stage-1"]["parameters"] == 300 * 64 + layer
    assert parts["stage-2"]["parameters"] == 3 * layer + 64
    assert main(["models", "inspect", str(sharded)]) == 0
    table = " ".join(capsys.readouterr().out.split())
    for piece in ("int4 in groups of 64", "computing in bf16", "stage-2", "1–3", "caches of 4096 rows"):
        assert piece in table


def test_verify_and_a_board(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["models", "verify", str(sharded)]) == 0
    assert capsys.readouterr().out.count("files are as written") == 3
    board = tmp_path / "board"
    shutil.copytree(sharded / "stage-2", board / "stage-2")
    shutil.copy(sharded / "manifest.json", board)
    assert main(["models", "verify", str(board), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"sound": ["stage-2"], "wrong": {},
                                                   "absent": ["stage-1", "draft"]}
    assert main(["models", "inspect", str(board)]) == 0
    assert "draft (not here)" in " ".join(capsys.readouterr().out.split())
    norm = board / "stage-2" / "norm.safetensors"
    norm.write_bytes(norm.read_bytes()[:-1] + b"\x99")
    assert "norm.safetensors has been altered" in fails(capsys, "verify", board)
    shutil.rmtree(board / "stage-2")
    assert "has none of the parts stage-1, stage-2, draft" in fails(capsys, "verify", board)
    assert "is not a sharded model" in fails(capsys, "inspect", "demo")


def test_again_it_is_finished(model: Path, sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["models", "shard", "--model", str(model), "--split", "1,3", "--dtype", "int4",
             "--out", str(sharded)]
    capsys.readouterr()
    assert main([*asked, "--group", "64"]) == 0
    assert "is finished already" in capsys.readouterr().out
    assert "already holds a sharded model" in fails(capsys, *asked[1:])
    assert main(["models", "verify", str(sharded)]) == 0


@pytest.mark.parametrize("kind", ["nf4", "int4"])
def test_the_boards_fastest_kind(model: Path, tmp_path: Path, kind: str) -> None:
    kernels, out = tmp_path / "kernels.json", tmp_path / "out"
    kernels.write_text(json.dumps({"fastest": kind, "more": 1}))
    assert main(["models", "shard", "--model", str(model), "--stages", "2", "--dtype", "4bit", "--kernels",
                 str(kernels), "--out", str(out)]) == 0
    assert Manifest.read(out).dtype == kind


def flowspec(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "flowspec_edge.cli.main", *map(str, arguments)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment})


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and errors."""
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def forked(work: Callable[[], int], errors: Path) -> tuple[BaseProcess, Path]:
    """Start ``work`` in a copy of this process, which has imported everything; its errors go to a file."""

    def child() -> None:
        torch.set_num_threads(1)
        sys.stderr = errors.open("w")
        code = work()
        sys.stderr.flush()
        sys.exit(code)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads, which do nothing
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    return process, errors


def test_interrupted_it_goes_on(tmp_path: Path) -> None:
    """A Ctrl-C when the first file is complete."""
    model, out = tiny_llama(tmp_path / "model", layers=6, hidden=512), tmp_path / "out"
    asked = ("models", "shard", "--model", model, "--stages", 3, "--dtype", "int4", "--out", out)

    def interrupted() -> int:
        def add(journal: Journal, file: PartFile) -> None:
            added(journal, file)
            os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        added = Journal.add
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "add", add)
            return main([str(word) for word in asked])

    process, errors = forked(interrupted, tmp_path / "errors")
    process.join(60)
    assert process.exitcode == 130
    assert errors.read_text().strip() == f"flowspec: interrupted; the same command resumes in {out}"
    assert not (out / "manifest.json").exists()
    assert main([str(word) for word in asked]) == 0
    for part in Manifest.read(out).parts:
        Manifest.read(out).check(part)


# -- the hub -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pickled", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_model_from_the_hub(tmp_path: Path, pickled: bool) -> None:
    home = tiny_llama(tmp_path / "tiny", layers=2)
    if pickled:
        as_bin(home)
    else:
        (home / "pytorch_model.bin").write_bytes(b"not wanted")
    (home / "onnx").mkdir()
    (home / "onnx" / "model.safetensors").write_bytes(b"not wanted either")
    (home / "README.md").write_text("nor this")
    cache, out = tmp_path / "cache", tmp_path / "out"
    with hub({"someone/tiny": home}) as (address, asked):
        here = {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
        process = flowspec("models", "shard", "--model", "someone/tiny", "--stages", 2, "--out", out, **here)
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert "2 stages, fp16, no draft model" in output
        manifest = Manifest.read(out)
        assert (manifest.source.name, manifest.source.revision) == ("someone/tiny", commit_of("someone/tiny"))
        got = {path.rpartition("/")[2] for path in asked if "/resolve/" in path}
        weights = "pytorch_model.bin" if pickled else "model.safetensors"
        assert got == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                       weights}
        assert not any("onnx" in path for path in asked if "/resolve/" in path)


@pytest.mark.soak
def test_offline_the_cache_is_enough(tmp_path: Path) -> None:
    home, cache = tiny_llama(tmp_path / "tiny", layers=2), tmp_path / "cache"
    with hub({"someone/tiny": home}) as (address, _):
        here = {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
        asked = ("models", "shard", "--model", "someone/tiny", "--stages", 2, "--out")
        assert ends(flowspec(*asked, tmp_path / "a", **here))[0] == 0
        code, errors = ends(flowspec(*asked[:3], "someone/else", *asked[4:], tmp_path / "d", **here))
        assert code == 2
        assert "no directory someone/else, and the hub does not provide it" in errors
        assert len(errors.strip().splitlines()) == 1
    for place, environment in (("b", here), ("c", {**here, "HF_HUB_OFFLINE": "1"})):
        assert ends(flowspec(*asked, tmp_path / place, **environment))[0] == 0
        Manifest.read(tmp_path / place).check("stage-1")
        code, errors = ends(flowspec(*asked[:3], "someone/else", *asked[4:], tmp_path / "d", **environment))
        assert code == 2
        assert len(errors.strip().splitlines()) == 1
