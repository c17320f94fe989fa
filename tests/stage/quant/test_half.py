"""Matrices in 16 bits under float32 rows, against a float64 re-computation and transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from kits.cluster_fixtures import tiny_head
from kits.family_checkpoints import family_dir
from kits.gguf_files import FAMILIES, tiny_gguf
from kits.tiny_models import tiny_model
from torch import nn

from flowspec_edge import Cluster
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.lab.plain import transformers_model
from flowspec_edge.model.opened import OpenModel, resolve_model
from flowspec_edge.sampling.settings import Sampling
from flowspec_edge.stage.output_head import load_output_head
from flowspec_edge.stage.quant.half import HalfLinear
from flowspec_edge.stage.shard import load_shard


@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (33, 17), (1, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_weights_rounded_to_16_bits(rows: int, columns: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    bias = torch.randn(rows, generator=generator) if with_bias else None
    x = torch.randn(40, columns, generator=generator)
    made = HalfLinear(weight, bias)
    wanted = x.double() @ weight.half().double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(made(x).double(), wanted, rtol=1e-5, atol=1e-5)
    assert made.packed_bytes == 2 * rows * columns
    assert made(x[None, :0]).shape == (1, 0, rows)


def test_a_row_has_the_same_bits_among_others_and_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    made, x = HalfLinear(torch.randn(200, 160, generator=generator)), torch.randn(33, 160, generator=generator)
    together = made(x)
    for first, count in ((0, 1), (7, 2), (30, 3), (1, 16), (0, 32)):
        assert torch.equal(made(x[first:first + count]), together[first:first + count])


def test_what_16_bits_cannot_hold_is_refused() -> None:
    with pytest.raises(FlowspecError, match=r"7e.04, and 16 bits hold 65504 at most: use --dtype fp32"):
        HalfLinear(torch.tensor([[1.0, -7e4]]))
    with pytest.raises(FlowspecError, match="a weight is nan"):
        HalfLinear(torch.tensor([[1.0, float("nan")]]))


def test_a_gpu_is_refused(tmp_path: Path) -> None:
    made = tiny_model("llama", tmp_path / "model")
    with pytest.raises(UsageError, match="mixed is for CPUs: use fp16 or bf16 on cuda"):
        load_shard(made, 0, 1, "mixed", "cuda")
    with pytest.raises(UsageError, match="mixed is for CPUs"):
        load_output_head(made, "mixed", "cuda")


def test_a_stage_holds_half_of_the_bytes(tmp_path: Path) -> None:
    made = tiny_model("llama", tmp_path / "model", hidden=64)
    whole, half = (load_shard(made, 1, 2, dtype) for dtype in ("fp32", "mixed"))  # without embeddings
    norms = sum(part.numel() for module in half.modules for part in module.parameters()) + 64
    assert half.nbytes == (whole.nbytes - 4 * norms) / 2 + 4 * norms
    assert load_output_head(made, "mixed").nbytes == load_output_head(made, "fp32").nbytes / 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stages", [1, 2])
def test_texts_are_those_of_transformers_with_rounded_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              family: str, stages: int) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, file = tiny_gguf(family, tmp_path, lambda name: GGMLQuantizationType.Q8_0, vocab=112)
    tiny_head(tmp_path / "eagle2", vocab=112)
    found = resolve_model(file)
    theirs = transformers_model(found, "fp32")
    with torch.no_grad():
        for part in (*theirs.model.layers.modules(), theirs.lm_head):
            if isinstance(part, nn.Linear):
                part.weight = nn.Parameter(part.weight.half().float())
    prompt = [5, 17, 33, 9]
    wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None,
                             pad_token_id=0)[0, 4:].tolist()
    with Cluster.virtual(file, stages=stages, dtype="mixed") as cluster:
        for strategy in ("autoregressive", "flowspec_plus"):
            request = replace(cluster.request(prompt, strategy=strategy, max_new_tokens=24), stop_ids=frozenset())
            assert list(cluster.generate(request).tokens) == wanted
        assert cluster.plain(request) == wanted


def test_texts_of_sampling_do_not_depend_on_the_method(tmp_path: Path) -> None:
    made = OpenModel(tiny_model("llama", tmp_path / "model", vocab=112))
    tiny_head(made.path / "eagle2", vocab=112)
    with Cluster.virtual(made.path, stages=2, dtype="mixed") as cluster:
        texts = set()
        for strategy in ("autoregressive", "flowspec_plus", "flowspec"):
            request = cluster.request([5, 17, 33], strategy=strategy, max_new_tokens=24, sampling=Sampling(1.0, seed=3))
            texts.add(tuple(cluster.generate(request).tokens))
        texts.add(tuple(cluster.plain(request)))
    assert len(texts) == 1


@pytest.mark.parametrize("family", ["qwen3.5-moe", "gpt-oss", "qwen3-next", "phi3", "ministral3"])
def test_other_families_write_plain_decodings_text(tmp_path: Path, family: str) -> None:
    with Cluster.virtual(family_dir(family, tmp_path), stages=2, dtype="mixed") as cluster:
        request = replace(cluster.request([5, 7, 9, 11], strategy="autoregressive", max_new_tokens=8),
                          stop_ids=frozenset())
        assert list(cluster.generate(request).tokens) == cluster.plain(request)
