"""Parts are read once and leave nothing in the page cache; what was altered anywhere is refused.

The page cache is asked by mincore, the bytes read by /proc/self/io, the peak of memory by VmHWM.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.sharded_models import cut
from kits.stages import stored_state
from kits.tiny_models import tiny_llama, tiny_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from flowspec_edge.drafting.checkpoint import read_weights
from flowspec_edge.drafting.eagle.eagle2 import EagleHead, eagle_config, save_head
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.manifest import Manifest
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.weights.checkpoint import Checkpoint
from flowspec_edge.stage.shard import load_lm_head, load_shard
from flowspec_edge.util.bounded_read import UncachedFile

_LIBC = ctypes.CDLL(None, use_errno=True)


def cached(directory: Path) -> int:
    """Bytes of the files below a directory that the page cache holds."""
    return sum(_cached(path) for path in directory.rglob("*") if path.is_file() and path.stat().st_size)


def _cached(path: Path) -> int:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), pages)
        del start  # else the mapping cannot be closed
        assert not failed, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def drop(directory: Path) -> None:
    """Skips where the file system keeps its pages, as tmpfs does."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:
                os.fsync(file.fileno())
            UncachedFile(path).drop()
    if kept := cached(directory):
        pytest.skip(f"the file system of {directory} keeps {kept} bytes in memory")


def figure(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path("/proc/self", file).read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and the same in one part of 119 MB."""
    home = tmp_path_factory.mktemp("large")
    tiny_llama(home / "whole", layers=3, hidden=1024)
    cut(home / "whole", home / "cut", stages=1, dtype="fp32")
    return home


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cut", "whole"])
def test_a_stage_reads_once_and_leaves_nothing(large: Path, model: str) -> None:
    home = large / model
    files = home / "stage-1" if OpenModel(home).sharded else home
    assert size_of(files) > 100e6
    load_shard(home, 0, 1, "fp32")  # whatever is loaded on first use
    drop(files)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    except OSError as error:
        pytest.skip(f"no peak of memory here: {error}")
    before, mapped = figure("status", "VmRSS"), figure("status", "RssFile")
    read = figure("io", "rchar")
    shard = load_shard(home, 0, 1, "fp32")
    assert figure("io", "rchar") - read < 1.02 * size_of(files)
    libraries = max(0, figure("status", "RssFile") - mapped)  # pages that the kernel had taken away before
    assert (figure("status", "VmHWM") - before - libraries) * 1024 < shard.nbytes + 40e6
    assert cached(files) < 8e6
    truth = {name: tensor for path in files.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for i, layer in enumerate(shard.modules):
        for name, tensor in stored_state(layer, shard.config).items():
            assert same(tensor, truth[f"model.layers.{i}.{name}"])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit."""
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8),
                                                    other.contiguous().view(torch.uint8))


def test_d0_verify_and_draft_models_leave_nothing(large: Path) -> None:
    drop(large)
    load_lm_head(large / "cut", "fp32")
    Manifest.read(large / "cut").check("stage-1")
    for tensor in read_weights(large / "whole", "a head").values():
        tensor.read()
    assert cached(large) < 8e6


# A process of its own, since what earlier tests freed would count, and a child of it for each, for which all
# of this is imported already.  Its malloc returns every matrix when it is freed: by default it keeps what is
# smaller than the largest that was freed, and the peak, 1.3 to 1.7 times the files, depends on the holes.
_LOAD_AND_MEASURE = """
import ctypes, json, os, re, sys
from functools import partial
from pathlib import Path

import torch

from flowspec_edge.drafting.load import load_drafters
from flowspec_edge.stage.quant.schemes import head_scheme, quantise_linears
from flowspec_edge.stage.shard import load_shard


def head(path):
    how = partial(quantise_linears, scheme=head_scheme("int4"), device=torch.device("cpu"))
    return load_drafters("eagle2", path, torch.zeros(64, 1408, dtype=torch.bfloat16), None, "bf16", 2, how)()


def model(path):
    return load_drafters("lm", path, torch.zeros(256, 1408, dtype=torch.float16), None, "fp16", 2)()


def experts(path):
    return load_shard(path, 0, 1, "fp16")


def figure(name):
    return int(re.search(rf"^{name}:\\s+(\\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


def measure(load, path):
    load(path)  # whatever is loaded on first use
    ctypes.CDLL(None).malloc_trim(0)
    before, mapped = figure("VmRSS"), figure("RssFile")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        return {"skipped": str(error)}
    made = load(path)
    libraries = max(0, figure("RssFile") - mapped)  # pages that the kernel had taken away before
    return {"made": type(made).__name__, "peak": (figure("VmHWM") - before - libraries) * 1024}


for kind in (head, model, experts):
    if (child := os.fork()) == 0:
        found = measure(kind, Path(sys.argv[1]) / kind.__name__)
        print(json.dumps({"kind": kind.__name__, **found}), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, kind
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By kind: the class of what was loaded, the peak of memory, the bytes and place of its files."""
    home = tmp_path_factory.mktemp("loaded")
    head = eagle_config({"vocab_size": 64, "hidden_size": 1408, "intermediate_size": 8192, "num_hidden_layers": 1,
                         "num_attention_heads": 8}, "a head")
    save_head(EagleHead(head), home / "head/eagle2", torch.bfloat16)
    config = LlamaConfig(vocab_size=256, hidden_size=1408, intermediate_size=2048, num_hidden_layers=2,
                         num_attention_heads=8)
    for part in ("draft-lm", "target"):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(home / "model" / part)
    tiny_model("qwen3_moe", home / "experts", layers=2, hidden=1024, head_dim=64, num_experts=16,
               num_experts_per_tok=2, moe_intermediate_size=512, dtype=torch.bfloat16)
    ran = subprocess.run([sys.executable, "-c", _LOAD_AND_MEASURE, str(home)], capture_output=True, text=True,
                         check=False, cwd=Path(__file__).parents[3],
                         env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"})
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    if reasons := [each["skipped"] for each in found if "skipped" in each]:
        pytest.skip(f"no peak of memory here: {reasons[0]}")
    files = {"head": "head", "model": "model/draft-lm", "experts": "experts"}
    return {each["kind"]: {**each, "size": size_of(home / files[each["kind"]]), "path": home / each["kind"]}
            for each in found}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "made", "least", "most"), [
    ("head", "EagleDrafter", 85e6, 0.7),  # becomes 26 MB in 4 bits, matrix by matrix
    ("model", "LMDrafter", 60e6, 1.3),  # in another dtype than it is stored in, with matrices of at most 6 MB
])
def test_a_draft_model_is_not_held_twice(loaded: dict[str, Any], kind: str, made: str, least: float, most: float
                                         ) -> None:
    found = loaded[kind]
    assert found["size"] > least
    assert found["made"] == made
    assert found["peak"] < most * found["size"]


@pytest.mark.slow
def test_experts_are_read_one_by_one(loaded: dict[str, Any]) -> None:
    """Two layers of 16 experts of 3 MB, in another dtype than they are stored in."""
    experts = loaded["experts"]
    assert experts["made"] == "Shard"
    assert experts["peak"] < load_shard(experts["path"], 0, 1, "fp16").nbytes + 15e6


def test_packed_matrices_are_read_once(tmp_path: Path) -> None:
    """Their scales lie before them in the file. The tensors' ends are read again for the digest."""
    cut(tiny_llama(tmp_path / "whole", layers=2, hidden=512), tmp_path / "cut", stages=1, dtype="int4")
    load_shard(tmp_path / "cut", 0, 1, "bf16")
    read = figure("io", "rchar")
    load_shard(tmp_path / "cut", 0, 1, "bf16")
    assert figure("io", "rchar") - read < 1.09 * size_of(tmp_path / "cut" / "stage-1")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("small")
    cut(tiny_llama(home / "whole", layers=2, hidden=64), home / "int4", stages=1, dtype="int4", group=64)
    cut(home / "whole", home / "fp32", stages=1, dtype="fp32")
    return home


def load(model: Path, part: str) -> None:
    if part == "stage-1":
        load_shard(model, 0, 1, "fp32")
    else:
        load_lm_head(model, "fp32")


@given(place=st.data(), dtype=st.sampled_from(["int4", "fp32"]), part=st.sampled_from(["stage-1", "draft"]),
       header=st.booleans(), flipped=st.integers(1, 255))
def test_a_byte_that_differs_is_the_manifests_error(small: Path, place: st.DataObject, dtype: str, part: str,
                                                    header: bool, flipped: int) -> None:
    path = place.draw(st.sampled_from(sorted(p for p in (small / dtype / part).rglob("*") if p.is_file())))
    whole = path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little") if path.suffix == ".safetensors" else len(whole)
    at = place.draw(st.integers(0, (length if header else len(whole)) - 1))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ flipped]) + whole[at + 1 :])
    try:
        with pytest.raises(FlowspecError, match=f"{re.escape(str(path))} has been altered: its sha"):
            load(small / dtype, part)
    finally:
        path.write_bytes(whole)
    load(small / dtype, part)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_file_cut_short_meanwhile_is_one_line(large: Path, tmp_path: Path, sharded: bool) -> None:
    home = Path(shutil.copytree(large / "cut", tmp_path / "copy"))
    name, path = "model.layers.1.mlp.up_proj.weight", home / "stage-1" / "layer-00001.safetensors"

    def pieces() -> Iterator[object]:
        if not sharded:
            yield from Checkpoint(home / "stage-1").pieces(name)
            return
        with OpenModel(home).part("stage-1") as part:
            yield from part.checkpoint.pieces(name)

    def read() -> None:
        for _ in pieces():
            os.truncate(path, path.stat().st_size // 2)

    with pytest.raises(FlowspecError, match=r"layer-00001\.safetensors was cut short while it was") as no:
        read()
    assert "\n" not in str(no.value)
