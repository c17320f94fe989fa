"""Splitting a model, loading one part of it, and errors about damaged checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.sharded_models import edit
from kits.stages import stored_state
from kits.tiny_models import tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.stage.shard import find_embedding, load_lm_head, load_shard, split_layers
from flowspec_edge.util.weight_file import EmbeddingTable


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(model, tmp_path / "model"))


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


@pytest.mark.parametrize("size", [0, 5, 400, -1])
def test_a_truncated_file_is_named(copy: Path, size: int) -> None:
    path = copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(FlowspecError, match=r"model\.safetensors") as caught:
        load_shard(copy, 0, 2, "fp32")
    assert "\n" not in str(caught.value)


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.*config\.json"):
        load_shard(tmp_path / "nowhere", 0, 1, "fp32")


def test_bad_requests(model: Path) -> None:
    with pytest.raises(UsageError, match="2 of 2"):
        load_shard(model, 2, 2, "fp32")
    with pytest.raises(UsageError, match="stages"):
        load_shard(model, 0, 0, "fp32")
    with pytest.raises(UsageError, match="'int3'"):
        load_shard(model, 0, 1, "int3")
