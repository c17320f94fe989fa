"""Files written piece by piece, against the real safetensors library, both ways."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.sharding.writer import TensorFile, file_size

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
          torch.int16, torch.int8, torch.uint8, torch.bool]

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__")
layouts = st.dictionaries(names, st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6)


def random_tensors(layout: dict[str, tuple[tuple[int, ...], torch.dtype]], seed: int
                   ) -> dict[str, torch.Tensor]:
    """Random bits, which must be preserved whatever numbers they are."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (shape, dtype) in layout.items():
        high = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8,
                            generator=generator)
        found[name] = raw.view(dtype).reshape(shape)
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype == b.dtype and a.shape == b.shape
            and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)))


def write(path: Path, tensors: dict[str, torch.Tensor], rows: int = 2) -> None:
    """Write a few rows of every tensor in turn."""
    layout = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    with TensorFile(path, layout) as file:
        for lo in range(0, max((len(t) for t in tensors.values() if t.ndim), default=0), rows):
            for name, tensor in tensors.items():
                if tensor.ndim:
                    file.write(name, tensor[lo:lo + rows])
        for name, tensor in tensors.items():
            if not tensor.ndim:
                file.write(name, tensor)


@given(layout=layouts, rows=st.integers(1, 4), seed=st.integers(0, 1000))
def test_the_library_reads_what_was_written(layout: dict[str, tuple[tuple[int, ...], torch.dtype]], rows: int,
                                            seed: int) -> None:
    """As much data as the library writes, and each tensor aligned, so that a mapped file can be used in place."""
    tensors = random_tensors(layout, seed)
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = Path(directory, "a.safetensors"), Path(directory, "b.safetensors")
        write(ours, tensors, rows)
        assert [path.name for path in Path(directory).iterdir()] == [ours.name]
        save_file(tensors, theirs, metadata={"format": "pt"})
        loaded, written, library = load_file(ours), ours.read_bytes(), theirs.read_bytes()
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], tensors[name]) for name in tensors)
    begin, other = (8 + int.from_bytes(data[:8], "little") for data in (written, library))
    assert len(written) == file_size(layout)
    assert len(written) - begin == len(library) - other
    header = json.loads(written[8:begin])
    assert all((begin + header[name]["data_offsets"][0]) % layout[name][1].itemsize == 0 for name in layout)
    assert begin % 8 == 0


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    layout = {"a": ((4, 2), torch.float32)}
    with pytest.raises(ValueError, match="rows of a are missing"), TensorFile(path, layout) as file:
        file.write("a", torch.zeros(3, 2))
    assert not list(tmp_path.iterdir())
    path.write_bytes(b"old")
    with TensorFile(path, layout) as file:
        file.write("a", torch.ones(4, 2))
        assert path.read_bytes() == b"old"
    assert torch.equal(load_file(path)["a"], torch.ones(4, 2))


@pytest.mark.parametrize("rows", [torch.zeros(5, 2), torch.zeros(1, 3), torch.zeros(1, 2).half()])
def test_rows_that_do_not_belong(tmp_path: Path, rows: torch.Tensor) -> None:
    with (pytest.raises(ValueError, match=r"^(a is|more rows)"),
          TensorFile(tmp_path / "x", {"a": ((4, 2), torch.float32)}) as file):
        file.write("a", rows)
    assert not list(tmp_path.iterdir())


def test_what_the_disk_says(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*nowhere.* No such file"):
        TensorFile(tmp_path / "nowhere" / "x", {})
    full = tmp_path / "full"
    full.with_name("full.partial").symlink_to("/dev/full")
    with pytest.raises(FlowspecError, match=r"no room to write .*full .*run the same command again"):
        TensorFile(full, {"a": ((4, 2), torch.float32)})
