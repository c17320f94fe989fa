"""``--device`` on every command that runs a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.sharded_models import cut
from kits.tiny_model_dir import tiny_model_dir
from kits.torch_devices import needs_cuda, without_cuda

from flowspec_edge.cli.common.options import device_of, loaded_bytes, plain_device_of
from flowspec_edge.cli.main import main
from flowspec_edge.drafting.eagle.eagle2 import load_head
from flowspec_edge.errors import UsageError
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.layers.kv_cache import KVArena
from flowspec_edge.stage.shard import load_lm_head, load_shard
from flowspec_edge.util import torchdevice
from flowspec_edge.util.torchdevice import TorchGpu

COMMANDS = [["generate", "x"], ["chat", "--chat-template", "vicuna"], ["serve", "--port", "0"], ["demo"],
            ["bench", "run"], ["bench", "tables"], ["bench", "timeline"], ["sweep", "bandwidth"],
            ["sweep", "stages"], ["sweep", "depth"], ["sweep", "segment"], ["sweep", "latency"],
            ["sweep", "bandwidth", "--links", "namespaces"]]
SHORT = ["--stages", "2", "--max-new-tokens", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=4)


@without_cuda
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_gpu_is_one_line(model: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main([*command, "--model", str(model), "--device", "cuda:1"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("flowspec: error: --device cuda:1: ")
    assert 'compute on the CPU (--device cpu, torch_device = "cpu")\n' in err


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_cuda)])
def test_generate_and_bench_tell_the_device(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                            device: str) -> None:
    texts = []
    for options in ([], ["--clock", "virtual"]):
        assert main(["generate", "x = 1", "--model", str(model), "--device", device, "--json", *SHORT,
                     *options]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["device"] == device
        texts.append(said["text"])
    assert main(["generate", "x = 1", "--model", str(model), "--device", "cpu", *SHORT]) == 0
    assert {capsys.readouterr().out[:-1]} == set(texts)
    out = tmp_path / "out.json"
    assert main(["bench", "run", "--model", str(model), "--device", device, "--limit", "1", "--truncate", "9",
                 "--json", str(out), *SHORT]) == 0
    report = json.loads(out.read_text())
    assert report["settings"]["device"] == device
    assert ("gpu" in report["machine"]) == (device != "cpu")


@without_cuda
def test_auto_is_the_cpu_here(model: Path) -> None:
    assert device_of("auto", OpenModel(model), "fp32") == device_of("cpu", OpenModel(model), "fp32") == "cpu"


def test_what_must_fit_is_the_model_its_caches_and_every_process(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the byte, on a GPU described by its facts; plain decoding has weights of its own."""
    found, free = OpenModel(model), [0]
    monkeypatch.setattr(torchdevice, "gpus", lambda: [TorchGpu("G", (8, 0), 0, 0),
                                                      TorchGpu("H", (8, 0), *free * 2)])
    monkeypatch.setattr(torchdevice, "architectures", lambda: ["sm_80"])
    for processes, rows in ((1, None), (3, None), (1, 9000)):
        free[0] = processes * torchdevice.CONTEXT_BYTES + loaded_bytes(found, "fp16", 1, rows)
        assert device_of("cuda:1", found, "fp16", processes=processes, rows=rows) == "cuda:1"
        free[0] -= 1
        with pytest.raises(UsageError, match=rf"--device cuda:1: {model.name} takes about .* use --dtype"):
            device_of("cuda:1", found, "fp16", processes=processes, rows=rows)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("flowspec_edge.cli.common.options._DRIVERS", ("null",))  # there is always that one
    assert device_of("auto", found, "fp16", rows=9000) == "cpu"
    err = capsys.readouterr().err
    assert err.startswith(f"flowspec: note: computing on the CPU: {model.name} takes about ")
    assert err.count("\n") == 1
    free[0] += 1
    assert device_of("auto", found, "fp16", rows=9000) == "cuda:1"
    assert capsys.readouterr().err == ""
    free[0] = 2 * torchdevice.CONTEXT_BYTES + loaded_bytes(found, "fp16", copies=2)
    assert plain_device_of("cuda:1", found, "fp16", 2) == "cuda:1"
    assert plain_device_of("cpu", found, "fp16", 2) == "cpu"
    assert capsys.readouterr().err == ""
    free[0] -= 1
    assert plain_device_of("cuda:1", found, "fp16", 2) == "cpu"
    err = capsys.readouterr().err
    assert err.startswith("flowspec: note: plain decoding computes on the CPU: --device cuda:1: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_bytes_are_those_of_what_is_loaded(model: Path, tmp_path: Path, dtype: str, sharded: bool) -> None:
    """The shards' own, lm_head's, the head's and the caches' that 100 rows take."""
    found = OpenModel(model)
    whole = load_shard(found.target, 0, 1, dtype)
    torch_dtype = whole.dtype
    lm_head = load_lm_head(found.target, dtype)
    head = load_head(model / "eagle2", lm_head, torch_dtype)
    config = whole.config
    caches = [KVArena(range(layers), config.num_key_value_heads, config.head_dim, torch_dtype, whole.device,
                      rows=100).nbytes for layers in (whole.layers[1], 1)]
    in_memory = (p for name, p in head.named_parameters() if not name.startswith("embed_tokens"))
    d0 = lm_head.nbytes + sum(p.numel() for p in in_memory) * torch_dtype.itemsize
    if sharded:
        cut(found.target, tmp_path / "cut", 2, "fp16", drafts=[model / "eagle2"])
        found = OpenModel(tmp_path / "cut")
    copies = [loaded_bytes(found, dtype, n, 100) for n in (1, 2)]  # type: ignore[arg-type]
    assert copies[1] - copies[0] == whole.nbytes
    assert copies[0] == pytest.approx(whole.nbytes + d0 + sum(caches), rel=0.05)
