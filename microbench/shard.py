"""Peak memory of sharding and of loading a stage, each in a fresh process.

    python -m microbench.shard [--dtype fp16,int4,nf4]
    python -m microbench.shard --shape 13b

Peaks exclude the interpreter with torch and transformers imported.  The unit for sharding is the model's
largest layer as stored, for loading the stage's bytes.  ``--shape 13b`` shards a Llama of 13 billion random
parameters, generated in slices, into int4 for four stages, and measures the resident memory of a stage with
a cache of 4096 rows.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from flowspec_edge.messages import Open, Segment, pack_bits
from flowspec_edge.model.manifest import Manifest, ShardDtype
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sharding.job import run
from flowspec_edge.sharding.plan import make_plan, ranges_for, recipe_for
from flowspec_edge.sharding.source import describe, open_source
from flowspec_edge.sharding.writer import TensorFile
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.families.decoder import skeleton
from flowspec_edge.stage.quant.grouped import GroupedScheme, pack
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.stage.weights import tensor_names
from flowspec_edge.util.procfs import sizes
from flowspec_edge.util.weight_file import TensorInfo
from microbench._common import Row, print_rows

CONTEXT = 4096  # rows of the cache
ROWS = 16  # of the segment that a loaded stage computes
_PIECE = 1 << 20
_STATUS = Path("/proc/self/status")
Figures = TypeVar("Figures")


@dataclass(frozen=True)
class LlamaShape:
    layers: int
    width: int
    intermediate: int
    heads: int
    vocabulary: int

    def write_config(self, directory: Path) -> None:
        """Write config.json, and an empty tokenizer file, which sharding requires."""
        directory.mkdir()
        LlamaConfig(
            num_hidden_layers=self.layers, hidden_size=self.width, intermediate_size=self.intermediate,
            num_attention_heads=self.heads, num_key_value_heads=self.heads, vocab_size=self.vocabulary,
            max_position_embeddings=CONTEXT).save_pretrained(directory)
        (directory / "tokenizer.json").write_text("{}\n")

    def write(self, directory: Path) -> None:
        self.write_config(directory)
        weights = RandomWeights(directory)
        stored = weights.stored(weights.names)
        with TensorFile(directory / "model.safetensors",
                        {name: (tuple(s.shape), s.dtype) for name, s in stored.items()}) as file:
            for name in stored:
                for _, piece in weights.pieces(name):
                    file.write(name, piece)


TINY = LlamaShape(layers=1, width=128, intermediate=256, heads=2, vocabulary=64)
CUT = LlamaShape(layers=2, width=2048, intermediate=5632, heads=16, vocabulary=2048)
LOADED = LlamaShape(layers=2, width=4096, intermediate=11008, heads=32, vocabulary=1024)
LARGE = LlamaShape(layers=40, width=5120, intermediate=13824, heads=40, vocabulary=32000)


class Nearest(GroupedScheme):
    """Grouped int4 without the search for the best scale: hours of work that is useless for noise."""

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        groups = weight.float().view(-1, self.group_of(16, weight.shape[1]))
        low, high = groups.aminmax(dim=1, keepdim=True)
        scale = (high - low) / 15
        codes = ((groups - low) / scale).round_().to(torch.uint8).view(weight.shape)
        return {"qweight": pack(codes), "scales": scale.view(len(weight), -1).bfloat16(),
                "zeros": (low + 8 * scale).view(len(weight), -1).bfloat16()}


class RandomWeights:
    """A checkpoint in fp16 without files: each read generates the same rows."""

    gguf = None  # they are in no file

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        core = skeleton(OpenModel(directory).decoder)
        self._shapes = {f"model.{name}": value.shape for name, value in core.state_dict().items()}
        self._shapes[tensor_names.LM_HEAD] = self._shapes[tensor_names.EMBEDDING]
        self._noise = torch.randn(_PIECE, generator=torch.Generator().manual_seed(0)).mul_(0.02).half()

    @property
    def names(self) -> list[str]:
        return list(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def stored(self, names: list[str]) -> dict[str, TensorInfo]:
        return {name: TensorInfo(self._shapes[name], torch.float16) for name in names}

    def pieces(self, name: str, rows: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Yield norms of ones, and of every other tensor the same noise, rotated by its own offset."""
        shape = self._shapes[name]
        columns = prod(shape[1:])
        step = rows or max(1, _PIECE // columns)
        start = self._shapes[name].numel() + sum(name.encode())
        for lo in range(0, shape[0], step):
            n = min(step, shape[0] - lo)
            if len(shape) == 1:
                yield lo, torch.ones(n, dtype=torch.float16)
            else:
                turned = torch.roll(self._noise, start + lo)
                yield lo, turned.repeat(-(-n * columns // _PIECE))[: n * columns].view(n, columns)

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        return {name: torch.cat([piece for _, piece in self.pieces(name)]) for name in names}

    def digest(self, names: list[str]) -> str:
        return f"random {sorted(names)}"


def sharding(dtype: ShardDtype, directory: Path) -> list[Row]:
    source = directory / "source"
    if not source.is_dir():
        CUT.write(source)
    layer, peak = in_fresh_process(_shard, source, directory / f"cut-{dtype}", dtype)
    return [(f"sharding to {dtype}: peak / largest layer ({layer / 1e6:.0f} MB)", peak / layer, "x")]


def loading(dtype: ShardDtype, directory: Path) -> list[Row]:
    """Measure loading a stage of two layers of a 7B model."""
    source, out = directory / f"made-{dtype}", directory / f"stages-{dtype}"
    LOADED.write_config(source)
    in_fresh_process(_make, source, out, dtype, (2,))
    stage_bytes, peak = in_fresh_process(_load, out)
    return [(f"loading a stage of {dtype}: peak / its bytes ({stage_bytes / 1e6:.0f} MB)", peak / stage_bytes, "x")]


def large(directory: Path) -> list[Row]:
    """Measure a 13B model in int4 over four stages.

    The rows are about stage 1 with a full cache, after a segment.
    """
    source, out = directory / "source", directory / "out"
    LARGE.write_config(source)
    layer, cutting = in_fresh_process(_make, source, out, "int4", (10, 10, 10, 10))
    subprocess.run([sys.executable, "-m", "flowspec_edge.cli.main", "models", "inspect", str(out),
                    "--context", str(CONTEXT)], check=True)
    stage_bytes, peak = in_fresh_process(_load, out)
    counted, resident = in_fresh_process(_serve, out)
    return [
        (f"sharding: peak / largest layer ({layer / 1e6:.0f} MB)", cutting / layer, "x"),
        (f"loading stage 1: peak / its bytes ({stage_bytes / 1e6:.0f} MB)", peak / stage_bytes, "x"),
        ("stage 1: weights and cache, counted", counted / 1e6, "MB"),
        (f"stage 1: resident, interpreter included, {CONTEXT} rows, {ROWS} computed", resident / 1e6, "MB"),
    ]


# ---- each of these runs in a process of its own ----------------------------------------------------


def _shard(source: Path, out: Path, dtype: ShardDtype) -> tuple[int, int]:
    """Shard a model; return the bytes of its largest layer as stored, and the peak of sharding."""
    warm_up(dtype)
    opened = open_source(str(source))
    plan = make_plan(opened, recipe_for(opened, dtype), ranges_for(opened.layers, 2, None))
    return _largest_layer(opened.tensors), _peak_of(lambda: run(plan, out))


def _make(source: Path, out: Path, dtype: ShardDtype, split: tuple[int, ...]) -> tuple[int, int]:
    warm_up(dtype)
    opened = describe(OpenModel(source), RandomWeights(source), (), "random")
    recipe = recipe_for(opened, dtype)
    if recipe.kind == "int4":
        recipe = replace(recipe, scheme=Nearest(recipe.group))
    plan = make_plan(opened, recipe, ranges_for(opened.layers, None, split))
    return _largest_layer(opened.tensors), _peak_of(lambda: run(plan, out))


def _load(out: Path) -> tuple[int, int]:
    """Load a stage; return its bytes in memory, and the peak of loading it."""
    shards: list[Any] = []
    manifest = Manifest.read(out)
    warm_up(manifest.dtype)
    peak = _peak_of(lambda: shards.append(load_shard(out, 0, manifest.stages, manifest.compute_dtype)))
    return shards[0].nbytes, peak


def _serve(out: Path) -> tuple[int, int]:
    """Compute a segment; return the bytes of weights and cache, and the resident bytes, interpreter included."""
    manifest = Manifest.read(out)
    shard = load_shard(out, 0, manifest.stages, manifest.compute_dtype)
    engine = StageEngine(shard)
    fill_caches(engine, CONTEXT)
    compute_behind(engine, CONTEXT)
    return shard.nbytes + engine.cache_bytes, sizes(_STATUS)["VmRSS"]


def fill_caches(engine: StageEngine, rows: int) -> None:
    """Fill all rows of a session but those of a segment: unwritten memory is not resident."""
    engine.open(Open(session=0, epoch=0, capacity=rows))
    cache = engine.cache_of(0)
    assert cache is not None
    cache.fill(rows - ROWS)


def compute_behind(engine: StageEngine, rows: int) -> None:
    """Compute the segment behind the cached rows, ``rows`` with it."""
    context = rows - ROWS
    numbers = np.arange(context, rows, dtype=np.int32)
    admitted = engine.admit(Segment(
        session=0, epoch=0, run=0, first=context, stop=rows, numbers=numbers, positions=numbers, base=context,
        bits=pack_bits([(2 << i) - 1 for i in range(ROWS)], ROWS),
        committed=np.arange(context, dtype=np.int32), tokens=numbers))
    assert admitted is not None
    engine.compute([admitted])


def in_fresh_process(measure: Callable[..., Figures], *arguments: object) -> Figures:
    """Return what ``measure`` returns in a process that has imported torch and the code of stages and sharder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flowspec_edge.stage.engine", "flowspec_edge.sharding.job"])
    with context.Pool(1) as pool:
        figures: Figures = pool.apply(measure, arguments)
        return figures


def warm_up(dtype: ShardDtype) -> None:
    """Shard and load a tiny model first, so that library code pages are not charged to the model."""
    with tempfile.TemporaryDirectory() as directory:
        source, out = Path(directory, "source"), Path(directory, "out")
        TINY.write(source)
        opened = open_source(str(source))
        manifest = run(make_plan(opened, recipe_for(opened, dtype), ((0, 1),)), out)
        load_shard(out, 0, 1, manifest.compute_dtype)


def _peak_of(work: Callable[[], object]) -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, which includes the peaks of imports
    before = sizes(_STATUS)["VmRSS"]
    work()
    return sizes(_STATUS)["VmHWM"] - before


def _largest_layer(tensors: dict[str, TensorInfo]) -> int:
    layers = Counter[str]()
    for name, stored in tensors.items():
        if name.startswith("model.layers."):
            layers[name.split(".")[2]] += stored.nbytes
    return max(layers.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=["13b"], help="instead: a model of this size; takes 7 GB of disk")
    parser.add_argument("--dtype", default="fp16,int4", help="how to store weights, with commas")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.shape:
            rows = large(Path(directory))
        else:
            rows = [row for dtype in options.dtype.split(",")
                    for row in (*sharding(dtype, Path(directory)), *loading(dtype, Path(directory)))]
    print_rows(rows)


if __name__ == "__main__":
    main()
