"""Files that are read past the page cache: against hashlib and the safetensors library."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flowspec_edge.errors import FlowspecError
from flowspec_edge.util import bounded_read, weight_file
from flowspec_edge.util.bounded_read import UncachedFile, sha256_of
from flowspec_edge.util.weight_file import DTYPES, SafetensorsFile


def test_sha256_is_hashlibs(tmp_path: Path) -> None:
    data, done = bytes(range(256)) * 40_000, list[int]()  # three pieces
    (tmp_path / "x").write_bytes(data)
    assert sha256_of(tmp_path / "x", done.append) == hashlib.sha256(data).hexdigest()
    assert sum(done) == len(data)
    with pytest.raises(FlowspecError, match=r"cannot read .*y: No such file"):
        sha256_of(tmp_path / "y")
    with pytest.raises(FlowspecError, match=r"cannot read .*: Is a directory"):
        sha256_of(tmp_path)


@given(data=st.binary(max_size=300), piece=st.integers(1, 50), reads=st.lists(st.tuples(
    st.integers(0, 300), st.integers(0, 300)), max_size=8))
def test_the_hash_is_the_same_in_any_order_of_reading(data: bytes, piece: int,
                                                      reads: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_read, "PIECE", piece)
        path = Path(directory, "x")
        path.write_bytes(data)
        file = UncachedFile(path, hashed=True)
        for at, count in reads:
            found = bytearray(count)
            if at + count <= len(data):
                file.read_into(memoryview(found), at)
                assert found == data[at : at + count]
            elif count:
                with pytest.raises(FlowspecError, match="was cut short while it was read"):
                    file.read_into(memoryview(found), at)
        if all(at + count <= len(data) or not count for at, count in reads):
            assert file.sha256() == hashlib.sha256(data).hexdigest()


def test_what_is_cut_short_has_no_hash(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    file = UncachedFile(tmp_path / "x", hashed=True)
    file.read_into(memoryview(bytearray(10)), 0)
    os.truncate(tmp_path / "x", 50)
    with pytest.raises(FlowspecError, match="x was cut short while it was read: copy the model again"):
        file.sha256()
    with pytest.raises(ValueError, match="was not opened to be hashed"):
        UncachedFile(tmp_path / "x").sha256()


@given(shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=len(DTYPES), max_size=len(DTYPES)),
       piece=st.integers(1, 100), rows=st.integers(0, 12), seed=st.integers(0, 99))
def test_every_dtype_is_the_librarys(shapes: list[list[int]], piece: int, rows: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)

    def tensor(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        most = 2 if dtype == torch.bool else 256
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        return torch.randint(most, (size,), generator=noise, dtype=torch.uint8).view(dtype).view(shape)

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_file, "PIECE", piece)
        path = Path(directory, "x.safetensors")
        save_file({name: tensor(shape, dtype)
                   for (name, dtype), shape in zip(DTYPES.items(), shapes, strict=True)}, path)
        file, truth = SafetensorsFile(path, hashed=True), load_file(path)
        assert file.tensors.keys() == truth.keys()
        for name in file.tensors:
            whole, pieces = truth[name], [part.clone() for _, part in file.pieces(name, rows)]
            assert same(file.read(name), whole)
            assert same(torch.cat([whole[:0], *pieces]) if whole.shape else pieces[0], whole)
        assert file.file.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype == other.dtype and one.shape == other.shape
            and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)))


@pytest.mark.parametrize(("entry", "says"), [
    ({"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}, "x is stored as 'F4', which cannot be read"),
    ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "truncated or damaged"),
    ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "truncated or damaged"),
    ({"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}, "truncated or damaged"),
    ({"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "truncated or damaged"),
    ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "truncated or damaged"),
    ({"dtype": "F32", "shape": [1]}, "truncated or damaged"),
    (7, "truncated or damaged"),
])
def test_headers_that_do_not_describe_their_file(tmp_path: Path, entry: object, says: str) -> None:
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(FlowspecError, match=rf"x\.safetensors.*{says}"):
        SafetensorsFile(path)
