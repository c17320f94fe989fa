"""``flowspec models shard``, ``inspect`` and ``verify``, on the command line, with a local hub."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from kits.hub_server import Commands, Hub, commit_of
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
    for piece in ("int4 in groups of 64", "computing in bf16", "stage-2", "1–3", "caches of 4096 rows",
                  "has at most 2048 tokens: caches of 4096 rows are for several requests at once"):
        assert piece in table


def test_verify_and_a_board(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_again_it_is_finished(model: Path, sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["models", "shard", "--model", str(model), "--split", "1,3", "--dtype", "int4",
             "--out", str(sharded)]
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


def test_interrupted_it_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str]) -> None:
    """As by a Ctrl-C when the first file is complete; test_interrupt sends signals."""
    out, add = tmp_path / "out", Journal.add
    command = ["models", "shard", "--model", str(model), "--stages", "3", "--dtype", "int4", "--out", str(out)]

    def interrupted(journal: Journal, file: PartFile) -> None:
        add(journal, file)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", interrupted)
        assert main(command) == 130
    assert capsys.readouterr().err.strip() == f"flowspec: interrupted; the same command resumes in {out}"
    assert not (out / "manifest.json").exists()
    assert main(command) == 0
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
    out = tmp_path / "out"
    with closing(Hub(tmp_path / "cache")) as online:
        online.repositories["someone/tiny"] = home
        code, output, errors = online.flowspec("models", "shard", "--model", "someone/tiny", "--stages", 2,
                                               "--out", out)
        assert code == 0, errors
        assert "2 stages, fp16, no draft model" in output
        manifest = Manifest.read(out)
        assert (manifest.source.name, manifest.source.revision) == ("someone/tiny", commit_of("someone/tiny"))
        got = {path.rpartition("/")[2] for path in online.asked if "/resolve/" in path}
        weights = "pytorch_model.bin" if pickled else "model.safetensors"
        assert got == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                       weights}
        assert not any("onnx" in path for path in online.asked if "/resolve/" in path)


@pytest.mark.soak
def test_offline_the_cache_is_enough(tmp_path: Path) -> None:
    def shards(commands: Commands, out: str) -> None:
        given = ("--stages", 2, "--out", tmp_path / out)
        assert commands.flowspec("models", "shard", "--model", "someone/tiny", *given)[0] == 0
        Manifest.read(tmp_path / out).check("stage-1")
        code, _, errors = commands.flowspec("models", "shard", "--model", "someone/else", *given[:3], tmp_path / "none")
        assert (code, len(errors.strip().splitlines())) == (2, 1)

    with closing(Hub(tmp_path / "cache")) as online:
        online.repositories["someone/tiny"] = tiny_llama(tmp_path / "tiny", layers=2)
        shards(online, "a")
    for out, environment in (("b", online.environment), ("c", {**online.environment, "HF_HUB_OFFLINE": "1"})):
        with closing(Commands(**environment)) as offline:
            shards(offline, out)
