"""A stage whose embeddings stay in their file, where that file is not, or does not remain, what it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kits.sharded_models import cut, edit
from kits.stages import Book, Oracle, admit, assert_rows
from safetensors.torch import load_file, save_file

from flowspec_edge.errors import FlowspecError
from flowspec_edge.messages import Close, Open, Output
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.shard import load_shard

TABLE = "model.embed_tokens.weight"
FILE = Path("stage-1", "embed.safetensors")


@pytest.fixture(scope="module")
def sharded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sharded") / "cut"
    cut(model, out, dtype="fp32", stages=1)
    return out


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


def opened(path: Path) -> StageEngine:
    engine = StageEngine(load_shard(path, 0, 1, "fp32"))
    engine.open(Open(session=1, epoch=0, capacity=64))
    return engine


def answer(engine: StageEngine, book: Book, tokens: list[int]) -> Output:
    [(_, output, *_)] = engine.compute([admit(engine, book.text(tokens))])
    assert isinstance(output, Output)
    return output


def rewrite(path: Path) -> None:
    """As long as before, in the same file."""
    whole = bytearray(path.read_bytes())
    whole[-4:] = b"\0\0\0\0"
    path.write_bytes(whole)
    os.utime(path, ns=(0, 0))  # two writes within a tick of the file system's clock have the same time


@pytest.mark.parametrize("change", [
    rewrite, lambda path: os.truncate(path, path.stat().st_size // 2), lambda path: os.truncate(path, 0),
    lambda path: os.truncate(path, 1 << 20)])
def test_a_table_that_changes_in_use(model: Path, copy: Path, change: Callable[[Path], None]) -> None:
    """One line, and no row of that pass in the cache; the sessions' end and a restart with the whole file
    are all that it takes."""
    engine, book, oracle = opened(copy), Book(), Oracle(model)
    assert_rows(answer(engine, book, [5, 17, 42]), book, oracle)
    whole = (copy / FILE).read_bytes()
    change(copy / FILE)
    with pytest.raises(FlowspecError, match=r"embed\.safetensors has changed while its embeddings") as no:
        answer(engine, book, [3, 3])
    assert "\n" not in str(no.value)
    assert engine.cached(1) == 3
    engine.close(Close(session=1))
    assert engine.sessions == ()
    (copy / FILE).write_bytes(whole)
    again = Book()
    assert_rows(answer(opened(copy), again, [5, 17, 42, 3, 3]), again, oracle)


def test_a_table_that_is_replaced_by_renaming_stays_the_old_one(model: Path, copy: Path) -> None:
    engine, book, oracle = opened(copy), Book(), Oracle(model)
    save_file({TABLE: torch.zeros_like(load_file(copy / FILE)[TABLE])}, copy / "new")
    os.replace(copy / "new", copy / FILE)
    assert_rows(answer(engine, book, [5, 17, 42]), book, oracle)


@pytest.mark.parametrize("shape", [(96, 32), (98, 32), (97, 16), (97,)])
def test_a_table_of_another_vocabulary_or_width(model: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    checkpoint = Path(shutil.copytree(model, tmp_path / "copy"))
    edit(checkpoint, model__embed_tokens__weight=torch.zeros(shape))
    with pytest.raises(FlowspecError, match=r"embed_tokens\.weight has shape .* asks for \[97, 32\]"):
        load_shard(checkpoint, 0, 2, "fp32")
    load_shard(checkpoint, 1, 2, "fp32")  # does not look tokens up
