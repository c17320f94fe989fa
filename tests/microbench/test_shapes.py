"""Shapes against published sizes, real stages and PyTorch's own counts; times are not judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.torch_devices import DEVICES, needs_cuda, without_cuda
from torch.nn import functional
from transformers import AutoModelForCausalLM

from flowspec_edge.stage.shard import load_shard
from microbench.shapes.__main__ import main
from microbench.shapes.d0 import part_times
from microbench.shapes.launches import cuda_launches, launches
from microbench.shapes.models import SHAPES, Shape, random_stage
from microbench.shapes.stage import segment_times

TINY = Shape("llama", 128, 4, 4, 2, 32, 256, 300)
TINY_QWEN = Shape("qwen3", 128, 4, 4, 2, 64, 256, 300)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setitem(SHAPES, "tiny-qwen", TINY_QWEN)


@pytest.mark.parametrize(("name", "parameters"), [
    ("llama-2-7b", 6_738_415_616), ("llama-2-13b", 13_015_864_320), ("llama-3.1-8b", 8_030_261_248),
    ("qwen3-8b", 8_190_735_360)])
def test_published_sizes(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[name].config(SHAPES[name].num_hidden_layers))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("shape", [TINY, TINY_QWEN], ids=lambda shape: shape.family)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_random_stage_is_like_a_loaded_one(tmp_path: Path, shape: Shape, dtype: str) -> None:
    """As many bytes, of the same names, shapes and strides; and no weight left undefined."""
    AutoModelForCausalLM.from_config(shape.config(6)).save_pretrained(tmp_path)
    loaded, made = load_shard(tmp_path, 1, 3, dtype), random_stage(shape, 2, dtype, "cpu")
    assert (made.nbytes, made.kinds[0], made.dtype) == (loaded.nbytes, loaded.kinds[0], loaded.dtype)
    for one, other in zip(made.modules, loaded.modules, strict=True):
        theirs = other.state_dict()
        for name, value in one.state_dict().items():
            assert (value.shape, value.stride(), value.dtype) == (
                theirs[name].shape, theirs[name].stride(), theirs[name].dtype)
            assert 0.01 < float(value.float().std() if value.ndim == 2 else value.float().mean()) < 2


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int4"])
def test_segments(device: str, dtype: str) -> None:
    for name in ("tiny", "tiny-qwen"):
        found = {layers: list(segment_times(name, dtype, device, layers, [1, 5], [7, 130], 1e10))
                 for layers in (1, 3)}
        for layers, times in found.items():
            assert [(t.context, t.rows) for t in times] == [(7, 1), (7, 5), (130, 1), (130, 5)]
            per_row = 2 * 2 * SHAPES[name].head_dim * (4 if dtype == "fp32" else 2) * layers
            assert times[2].bytes - times[0].bytes == (130 - 7) * per_row
            assert times[0].bytes - 7 * per_row == random_stage(SHAPES[name], layers, dtype, device).nbytes
            for t in times:
                assert t.whole_ms == pytest.approx(t.ms * 4 / layers)
                assert t.copy_share == pytest.approx(t.bytes / (t.ms * 1e-3) / 1e10)
                assert (t.cuda_launches is None) == (device == "cpu")
        more = found[3][0].launches - found[1][0].launches
        assert more % 2 == 0  # every layer launches the same
        assert 13 <= more // 2 <= 70


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_a_turn(device: str) -> None:
    parts = {part.part: part for part in part_times("tiny", "bf16", device)}
    assert parts["lm_head, 16 rows"].launches == 1
    most = 19 if device == "cuda" else 33  # a CPU rounds norms, sums and rotations apart, and composes activations
    assert parts["head, 10 nodes"].launches <= most
    assert len(parts) == 13
    assert all(part.ms >= 0 for part in parts.values())


def test_counts_of_kernel_launches() -> None:
    """A product with a bias is one, views are none, attention is one, a norm written out is several."""
    x, weight, bias = torch.randn(1, 2, 6, 8), torch.randn(4, 8), torch.randn(4)
    with torch.inference_mode():
        assert launches(lambda: functional.linear(x[0, 0], weight, bias)) == 1
        assert launches(lambda: x.view(2, 48).t()[1:3].unsqueeze(0)) == 0
        assert launches(lambda: functional.scaled_dot_product_attention(x, x, x)) == 1
        assert launches(lambda: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) == 5
        assert launches(lambda: functional.rms_norm(x, (8,))) == 1


@needs_cuda
def test_cudas_own_count() -> None:
    x = torch.randn(64, 64, device="cuda")
    assert cuda_launches(lambda: (x + 1) * 2) == launches(lambda: (x + 1) * 2) == 2


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert main(["--shape", "tiny", "--dtype", "fp32", "--layers", "2", "--rows", "1,3",
                 "--contexts", "9", "--json", str(out)]) == 0
    data: dict[str, Any] = json.loads(out.read_text())
    assert (data["shape"], data["dtype"], data["device"], data["layers"]) == ("tiny", "fp32", "cpu", 2)
    assert [(row["context"], row["rows"]) for row in data["stage"]] == [(9, 1), (9, 3)]
    assert len(data["d0"]) == 13
    said = capsys.readouterr().out
    assert "random weights in fp32, CPU, " in said
    assert "ms, 4 layers (scaled)" in said
    assert main(["d0", "--shape", "tiny", "--json", str(out)]) == 0
    assert "stage" not in json.loads(out.read_text())


@without_cuda
def test_without_a_gpu_the_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("microbench.shapes: error: --device cuda: ")
