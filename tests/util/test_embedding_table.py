"""Embeddings in their file against the tensor itself, and files that are not what they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.util.weight_file import EmbeddingTable, SafetensorsFile

V, H = 37, 12
NAME = "model.embed_tokens.weight"


def write(path: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(1)).to(dtype)
    save_file({"a": torch.ones(3), NAME: weight, "z": torch.zeros(5, dtype=torch.int64)}, path)
    return weight


def opened(path: Path, dtype: torch.dtype) -> EmbeddingTable:
    return EmbeddingTable(SafetensorsFile(path), NAME, dtype)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_those_of_the_tensor(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    weight = write(tmp_path / "m.safetensors", stored)
    table = opened(tmp_path / "m.safetensors", torch.float32).to(wanted)
    assert (table.num_embeddings, table.embedding_dim) == (V, H)
    plain = torch.nn.functional.embedding

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.integers(0, V - 1), max_size=9))
    def same(tokens: list[int]) -> None:
        ids = torch.tensor(tokens, dtype=torch.int64)
        assert torch.equal(table(ids), plain(ids, weight.to(wanted)))

    same()
    ids = torch.tensor([[0, V - 1], [5, 5]])
    assert torch.equal(table(ids), plain(ids, weight.to(wanted)))
    assert sum(t.numel() for t in (*table.parameters(), *table.buffers())) == 0


@pytest.mark.parametrize("token", [-1, V])
def test_a_token_outside_reads_no_other_tensor(tmp_path: Path, token: int) -> None:
    write(tmp_path / "m.safetensors")
    with pytest.raises(ProtocolError, match=f"token {token} is outside the vocabulary of {V}"):
        opened(tmp_path / "m.safetensors", torch.float32)(torch.tensor([token]))


def test_a_file_that_changes_in_use_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    weight = write(path)
    table = opened(path, torch.float32)
    whole = path.read_bytes()
    (tmp_path / "new").write_bytes(whole)
    os.replace(tmp_path / "new", path)  # the old file lives on
    assert torch.equal(table(torch.tensor([3]))[0], weight[3])
    other = opened(path, torch.float32)
    os.truncate(path, len(whole) // 2)
    with pytest.raises(FlowspecError, match=r"m\.safetensors has changed while"):
        other(torch.tensor([3]))
    assert torch.equal(table(torch.tensor([V - 1]))[0], weight[V - 1])


@pytest.mark.parametrize("spoil", [
    lambda data: data[:4], lambda data: data[:200], lambda data: data[:-200], lambda data: b"\xff" * 8 + data,
    lambda data: data.replace(NAME.encode(), b"model.embed_tokens.height"),
    lambda data: data.replace(b"F32", b"I32")])
def test_damaged_files_are_one_line(tmp_path: Path, spoil: object) -> None:
    path = tmp_path / "m.safetensors"
    save_file({NAME: torch.randn(V, H)}, path)
    path.write_bytes(spoil(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(FlowspecError, match=r"m\.safetensors") as refused:
        opened(path, torch.float32)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("shape", [(0, H), (V, 0), (V, H, 1), (V,)])
def test_a_table_without_rows_or_columns_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_file({NAME: torch.zeros(shape)}, tmp_path / "m.safetensors")
    with pytest.raises(FlowspecError, match=r"m\.safetensors"):
        opened(tmp_path / "m.safetensors", torch.float32)


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    weight = torch.zeros(V, H)
    weight[4, 2] = torch.nan
    save_file({NAME: weight}, tmp_path / "m.safetensors")
    with pytest.raises(FlowspecError, match=r"m\.safetensors: tensor model\.embed_tokens\.weight holds NaN"):
        opened(tmp_path / "m.safetensors", torch.float32)
