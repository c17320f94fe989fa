"""Reading weights piece by piece, in every format of files, against the libraries that wrote them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.sharded_models import as_bin, edit
from kits.tiny_models import tiny_llama, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.weights.checkpoint import Checkpoint, digest
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.util import weight_file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=2, hidden=32)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.mark.parametrize("files", [0, 1, 3])
def test_every_format_holds_the_same(model: Path, copy: Path, files: int) -> None:
    """0: safetensors in several files, as transformers splits them; else PyTorch's."""
    truth = load_file(model / "model.safetensors")
    if files:
        as_bin(copy, files)
    else:
        (copy / "model.safetensors").unlink()
        AutoModelForCausalLM.from_pretrained(model).save_pretrained(copy, max_shard_size="20KB")
        assert len(list(copy.glob("*.safetensors"))) > 2
    found = Checkpoint(copy)
    assert set(found.names) == set(truth)
    tensors = found.tensors(list(truth))
    assert all(torch.equal(tensors[name], truth[name]) for name in truth)
    stored = found.stored(list(truth))
    assert all((stored[n].shape, stored[n].dtype, stored[n].nbytes) == (t.shape, t.dtype, t.nbytes)
               for n, t in truth.items())
    assert found.digest(truth) == digest(truth) == Checkpoint(model).digest(truth)
    shards = [load_shard(path, 1, 2, "fp32") for path in (model, copy)]
    assert shards[0].digest == shards[1].digest
    for one, other in zip(*(dict(s.modules[0].named_parameters()).values() for s in shards), strict=True):
        assert torch.equal(one, other)


@given(shape=st.lists(st.integers(0, 40), max_size=3), rows=st.integers(0, 50), pickled=st.booleans(),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
       piece=st.integers(1, 4000))
def test_pieces_make_up_the_tensor(shape: list[int], rows: int, dtype: torch.dtype, pickled: bool, piece: int
                                   ) -> None:
    whole = torch.randn(shape).mul_(100).to(dtype)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_file, "PIECE", piece)  # so that small tensors are cut
        if pickled:
            torch.save({"x": whole}, Path(directory, "pytorch_model.bin"))
        else:
            save_file({"x": whole}, Path(directory, "model.safetensors"))
        found = Checkpoint(directory)
        pieces = [(lo, part.clone()) for lo, part in found.pieces("x", rows)]
        assert found.digest(["x"]) == digest({"x": whole})
    if not shape:
        assert len(pieces) == 1
        assert torch.equal(pieces[0][1], whole)
        return
    assert [lo for lo, _ in pieces] == [sum(len(p) for _, p in pieces[:i]) for i in range(len(pieces))]
    assert torch.equal(torch.cat([whole[:0], *(part for _, part in pieces)]), whole)
    if rows:
        assert all(len(part) <= rows for _, part in pieces)


def test_the_old_format_is_refused(copy: Path) -> None:
    as_bin(copy, _use_new_zipfile_serialization=False)
    with pytest.raises(FlowspecError, match=r"pytorch_model\.bin .*old format"):
        Checkpoint(copy)


@pytest.mark.parametrize("size", [0, 3, 2000, -1, -5000])
def test_a_truncated_bin_is_named(copy: Path, size: int) -> None:
    as_bin(copy)
    path = copy / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FlowspecError, match=r"model\.bin ") as no:
        Checkpoint(copy)
    assert "\n" not in str(no.value)


@pytest.mark.parametrize("content", [[torch.ones(1)], {"x": 1}])
def test_a_bin_without_tensors_is_refused(copy: Path, content: object) -> None:
    as_bin(copy)
    torch.save(content, copy / "pytorch_model.bin")
    with pytest.raises(FlowspecError, match="does not hold tensors by name"):
        Checkpoint(copy)


def test_code_in_a_bin_does_not_run(copy: Path) -> None:
    as_bin(copy)
    marker = copy / "ran"

    class Bad:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (marker,))

    torch.save({"x": Bad()}, copy / "pytorch_model.bin")
    with pytest.raises(FlowspecError, match=r"pytorch_model\.bin .*damaged") as refused:
        Checkpoint(copy)
    assert "weights_only" not in str(refused.value)
    assert not marker.exists()


def test_an_index_stays_in_its_directory(copy: Path) -> None:
    as_bin(copy, 2)
    index = copy / "pytorch_model.bin.index.json"
    index.write_text(index.read_text().replace("pytorch_model-", "../pytorch_model-"))
    with pytest.raises(FlowspecError, match="is not the name of a file beside it"):
        Checkpoint(copy)


def test_harmless_tensors_pass(copy: Path, tmp_path: Path) -> None:
    edit(copy, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
         model__layers__1__self_attn__masked_bias=torch.ones(()))
    load_shard(copy, 0, 2, "fp32")
    tied = tiny_model("llama", tmp_path / "tied", layers=2, hidden=32, tie_word_embeddings=True)
    edit(tied, lm_head__weight=torch.zeros(97, 32))
    load_shard(tied, 1, 2, "fp32")


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model\.safetensors.* pytorch_model\.bin"):
        Checkpoint(copy)
