"""Splitting a model, loading one part of it, and errors about damaged checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.stages import stored_state
from kits.tiny_models import tiny_llama, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.stage.shard import find_embedding, load_lm_head, load_shard, split_layers
from flowspec_edge.util.weight_file import EmbeddingTable


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=4, hidden=32)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a checkpoint, or drop them (None); "__" stands for "."."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


@given(layers=st.integers(1, 100), stages=st.integers(1, 100))
def test_split_is_even_and_complete(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(UsageError, match=f"{stages} stages.*{layers} layers"):
            split_layers(layers, stages)
    ranges = split_layers(layers, stages, allow_empty=True)
    assert [i for lo, hi in ranges for i in range(lo, hi)] == list(range(layers))
    sizes = [hi - lo for lo, hi in ranges]
    assert len(sizes) == stages
    assert max(sizes) - min(sizes) <= 1


def test_a_shard_holds_its_part_only(model: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(model).model
    shards = [load_shard(model, i, 3, "fp32") for i in range(3)]
    assert [s.layers for s in shards] == [(0, 2), (2, 3), (3, 4)]
    assert [s.embed is not None for s in shards] == [True, False, False]
    assert [s.norm is not None for s in shards] == [False, False, True]
    for shard in shards:
        held = 0
        for i, module in zip(range(*shard.layers), shard.modules, strict=True):
            stored = stored_state(module, shard.config)
            for name, weight in whole.layers[i].state_dict().items():
                assert torch.equal(stored.pop(name), weight)
                held += weight.nbytes
            assert stored == {}
        held += whole.norm.weight.nbytes if shard.norm else 0
        assert shard.nbytes == held


def embeddings(model: Path, dtype: str) -> torch.Tensor:
    """All rows, looked up."""
    table = find_embedding(model, dtype)
    assert isinstance(table, EmbeddingTable)
    assert sum(t.numel() for t in (*table.parameters(), *table.buffers())) == 0
    return table(torch.arange(table.num_embeddings))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_dtypes(model: Path, name: str, dtype: torch.dtype) -> None:
    shard = load_shard(model, 0, 1, name)
    assert {p.dtype for m in shard.modules for p in m.parameters()} == {dtype}
    assert load_lm_head(model, name).dtype == embeddings(model, name).dtype == dtype


def test_sharded_checkpoint(model: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    one, many = load_shard(model, 1, 2, "fp32"), load_shard(tmp_path, 1, 2, "fp32")
    assert one.digest == many.digest
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    missing = tmp_path / index["model.layers.3.mlp.up_proj.weight"]
    missing.unlink()
    with pytest.raises(FlowspecError, match=missing.name):
        load_shard(tmp_path, 1, 2, "fp32")


def test_digest_tells_shards_and_weights_apart(model: Path, copy: Path) -> None:
    digests = [load_shard(model, i, 2, "fp32").digest for i in range(2)]
    assert digests[0] != digests[1]
    assert load_shard(model, 0, 2, "bf16").digest == digests[0]
    edit(copy, model__layers__0__self_attn__q_proj__weight=torch.zeros(32, 32))
    assert load_shard(copy, 0, 2, "fp32").digest != digests[0]
    assert load_shard(copy, 1, 2, "fp32").digest == digests[1]


def test_lm_head_and_embedding(model: Path, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(model)
    assert torch.equal(load_lm_head(model, "fp32"), whole.lm_head.weight)
    assert torch.equal(embeddings(model, "fp32"), whole.model.embed_tokens.weight)
    tied = tiny_model("llama", tmp_path, layers=1, hidden=32, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert torch.equal(load_lm_head(tied, "fp32"), embeddings(tied, "fp32"))


def test_a_missing_head_is_named(copy: Path) -> None:
    edit(copy, lm_head__weight=None)
    with pytest.raises(FlowspecError, match=r"has no tensor lm_head\.weight"):
        load_lm_head(copy, "fp32")


def test_a_missing_tensor_is_named(copy: Path) -> None:
    edit(copy, model__layers__2__mlp__up_proj__weight=None)
    load_shard(copy, 0, 2, "fp32")  # the other stage does not need it
    with pytest.raises(FlowspecError, match=r"has no tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        load_shard(copy, 1, 2, "fp32")


def test_a_misshapen_tensor_is_named(copy: Path) -> None:
    edit(copy, model__norm__weight=torch.ones(31))
    with pytest.raises(FlowspecError, match=r"model\.norm\.weight .*\[31\].*\[32\]"):
        load_shard(copy, 1, 2, "fp32")


@pytest.mark.parametrize("size", [0, 5, 400, -1, -20_000])
def test_a_truncated_file_is_named(copy: Path, size: int) -> None:
    path = copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(FlowspecError, match=r"model\.safetensors") as caught:
        load_shard(copy, 0, 2, "fp32")
    assert "\n" not in str(caught.value)


def test_no_model(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.*config\.json"):
        load_shard(tmp_path / "nowhere", 0, 1, "fp32")
    (copy / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        load_shard(copy, 0, 1, "fp32")
    (copy / "model.safetensors.index.json").write_text("[1]")
    with pytest.raises(FlowspecError, match=r"model\.safetensors\.index\.json"):
        load_shard(copy, 0, 1, "fp32")


def test_bad_requests(model: Path) -> None:
    with pytest.raises(UsageError, match=r"5 stages.*4 layers"):
        load_shard(model, 0, 5, "fp32")
    with pytest.raises(UsageError, match="2 of 2"):
        load_shard(model, 2, 2, "fp32")
    with pytest.raises(UsageError, match="stages"):
        load_shard(model, 0, 0, "fp32")
    with pytest.raises(UsageError, match="'int3'"):
        load_shard(model, 0, 1, "int3")
