"""Stages and whole models from sharded directories, against transformers and dequantised weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.int4_matrices import grouped_weights
from kits.sharded_models import all_tensors, as_bin, cut, edit
from kits.stages import stored_state
from kits.tiny_models import tiny_llama, tiny_model
from transformers import AutoModelForCausalLM

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.lab.plain import load_reference_model
from flowspec_edge.model.manifest import Manifest
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.shard import load_shard, stage_ranges
from flowspec_edge.stage.weights.load import shard_digest

TEXT = torch.tensor([[5, 17, 42, 3, 3, 58, 11, 90]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=5, hidden=64)


@pytest.fixture(scope="module")
def dense(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dense") / "out"
    cut(model, out, dtype="fp32", split=(1, 3, 1))
    return out


@pytest.fixture(scope="module")
def int4(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int4") / "out"
    cut(model, out, dtype="int4", stages=2, group=64)
    return out


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return torch.as_tensor(model(TEXT, use_cache=False).logits[0]).float()


def test_a_stage_is_cut_where_the_manifest_says(model: Path, dense: Path) -> None:
    assert stage_ranges(dense, 3) == [(0, 1), (1, 4), (4, 5)]
    assert stage_ranges(model, 3) == [(0, 2), (2, 4), (4, 5)]
    whole = AutoModelForCausalLM.from_pretrained(model).model
    manifest = Manifest.read(dense)
    for index, (lo, hi) in enumerate(manifest.ranges):
        shard = load_shard(dense, index, 3, "fp32")
        assert shard.layers == (lo, hi)
        assert (shard.embed is not None, shard.norm is not None) == (index == 0, index == 2)
        assert shard.nbytes == manifest.part(f"stage-{index + 1}").weight_bytes
        for i, module in zip(range(lo, hi), shard.modules, strict=True):
            stored = stored_state(module, shard.config)
            for name, weight in whole.layers[i].state_dict().items():
                assert torch.equal(stored[name], weight)
    with pytest.raises(UsageError, match="was sharded into 3 stages, not 2"):
        load_shard(dense, 0, 2, "fp32")
    with pytest.raises(UsageError, match="was sharded into 3 stages, not 2"):
        stage_ranges(dense, 2, allow_empty=True)
    with pytest.raises(UsageError, match="no stage 3 of 3"):
        load_shard(dense, 3, 3, "fp32")


def test_a_board_needs_its_own_part_alone(dense: Path, tmp_path: Path) -> None:
    shutil.copy(dense / "manifest.json", tmp_path)
    shutil.copytree(dense / "stage-2", tmp_path / "stage-2")
    assert OpenModel(tmp_path).layers == OpenModel(tmp_path).parsed_config.num_hidden_layers == 5
    assert load_shard(tmp_path, 1, 3, "fp32").digest == load_shard(dense, 1, 3, "fp32").digest
    with pytest.raises(FlowspecError, match=r"stage-1/embed\.safetensors is missing"):
        load_shard(tmp_path, 0, 3, "fp32")


def test_a_digest_is_known_without_loading(dense: Path, int4: Path) -> None:
    cuts = [(dense, index, 3) for index in range(3)] + [(int4, index, 2) for index in range(2)]
    digests = [shard_digest(OpenModel(path).require_manifest(), index) for path, index, _ in cuts]
    assert digests == [load_shard(*cut, "fp32").digest for cut in cuts]
    assert len(set(digests)) == len(cuts)


def test_facts_of_a_model_need_no_tensor_library(dense: Path) -> None:
    code = (f"from flowspec_edge.model.opened import resolve_model\nmodel = resolve_model({str(dense)!r})\n"
            "print(model.layers, model.family.name, model.manifest.stages, model.drafts, model.stop_ids)\n"
            "import sys; print([m for m in ('torch', 'transformers') if m in sys.modules])")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["5 llama 3 [] frozenset({0})", "[]"]


def test_a_checkpoint_has_no_manifest(model: Path) -> None:
    assert OpenModel(model).manifest is None
    with pytest.raises(UsageError, match="is not a sharded model"):
        OpenModel(model).require_manifest()


@pytest.mark.parametrize("files", ["single", "several", "bin"])
def test_the_whole_of_a_checkpoint_is_transformers(model: Path, tmp_path: Path, files: str) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    whole = AutoModelForCausalLM.from_pretrained(model)
    if files == "several":
        (copy / "model.safetensors").unlink()
        whole.save_pretrained(copy, max_shard_size="100KB")
    elif files == "bin":
        as_bin(copy)
    found = load_reference_model(copy, "fp32")
    torch.testing.assert_close(logits(found), logits(whole), atol=1e-5, rtol=1e-5)
    assert found.generation_config.eos_token_id == whole.generation_config.eos_token_id
    assert torch.equal(found.generate(TEXT, max_new_tokens=6, do_sample=False),
                       whole.generate(TEXT, max_new_tokens=6, do_sample=False))


@pytest.mark.parametrize(("family", "extra"), [
    ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {"tie_word_embeddings": True})])
def test_the_whole_of_the_parts_is_transformers(tmp_path: Path, family: str, extra: dict[str, Any]) -> None:
    """Tied embeddings, biases, q/k norms."""
    path = tiny_model(family, tmp_path / "m", layers=3, hidden=64, **extra)
    cut(path, tmp_path / "out", dtype="fp32", stages=3)
    truth = logits(AutoModelForCausalLM.from_pretrained(path))
    found = load_reference_model(tmp_path / "out", "fp32")
    torch.testing.assert_close(logits(found), truth, atol=1e-5, rtol=1e-5)
    if extra:
        assert list(all_tensors(tmp_path / "out" / "draft")) == ["model.embed_tokens.weight"]


def test_four_bits_are_what_their_matrices_stand_for(model: Path, int4: Path) -> None:
    """The matrices worked out element by element in float64, in transformers' model."""
    whole = AutoModelForCausalLM.from_pretrained(model)
    stored = all_tensors(int4)
    packed = 0
    for name, linear in whole.model.named_modules():
        if f"model.{name}.qweight" in stored:
            parts = {suffix: stored[f"model.{name}.{suffix}"] for suffix in ("qweight", "scales", "zeros")}
            linear.weight.data = torch.from_numpy(grouped_weights(parts)).float()
            packed += 1
    assert packed == 5 * 7
    for module in (whole.lm_head, whole.model.embed_tokens):  # from fp32 to what devices compute in
        module.weight.data = module.weight.data.bfloat16().float()
    found = load_reference_model(int4, "fp32")
    torch.testing.assert_close(logits(found), logits(whole), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_quantised_stage_takes_what_the_manifest_says(int4: Path, dtype: str) -> None:
    manifest = Manifest.read(int4)
    assert (manifest.dtype, manifest.compute_dtype) == ("int4", "bf16")
    for index in range(2):
        shard = load_shard(int4, index, 2, dtype)
        if dtype == manifest.compute_dtype:
            assert shard.nbytes == manifest.part(f"stage-{index + 1}").weight_bytes
        assert "weight" not in dict(shard.modules[0].self_attn.qkv_proj.named_parameters())


def test_a_foreign_tensor_in_a_part_is_named(model: Path, tmp_path: Path) -> None:
    """Names of tensors are checked although the manifest has the altered file's hash."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    edit(copy, model__layers__9__x=torch.ones(2))
    with pytest.raises(FlowspecError, match=r"for tensor model\.layers\.9\.x"):
        cut(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
