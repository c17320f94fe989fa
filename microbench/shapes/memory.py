"""The memory that ``flowspec plan`` counts, against real parts of those shapes in a fresh process.

    python -m microbench.shapes.memory qwen3-32b --boards 5 --part stage-1
    python -m microbench.shapes.memory qwen3-32b --boards 5 --part draft
    python -m microbench.shapes.memory llama-3.1-8b --kv-cache int8

With one board both parts are loaded in one process, as ``flowspec serve`` does.  The parts are in int4, with
random bits in place of quantised weights; they take up to 10 GB of disk while it runs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from flowspec_edge.boards.planning.layer_split import problem_for
from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.boards.planning.read_parts import assumed_head
from flowspec_edge.d0.models import DraftModels
from flowspec_edge.drafting.checkpoint import HeadFiles
from flowspec_edge.drafting.eagle.eagle2 import EagleHead, head_config, save_head
from flowspec_edge.drafting.eagle.eagle3 import Eagle3Head
from flowspec_edge.drafting.eagle.eagle3_formats import save_head3
from flowspec_edge.drafting.tree_cache import CacheShape, TreeCache
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.catalogue import known_models
from flowspec_edge.model.draft_kinds import DRAFT_KINDS
from flowspec_edge.model.manifest import DRAFT, CacheBits, Manifest, PartFile, stage_part
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sharding.job import Journal, run
from flowspec_edge.sharding.plan import make_plan, ranges_for, recipe_for
from flowspec_edge.sharding.source import describe
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.quant.grouped import GroupedScheme
from flowspec_edge.stage.shard import load_shard
from flowspec_edge.util.procfs import sizes
from flowspec_edge.util.tensors import parse_dtype
from microbench._common import print_rows, random_codes
from microbench.shapes.models import fill_random
from microbench.shard import RandomWeights, compute_behind, fill_caches, in_fresh_process, warm_up

FIRST = stage_part(0)
_TEXT = 64  # rows that the draft cache takes at a time


@dataclass(frozen=True)
class Footprint:
    """The memory of a process, planned and measured, in bytes.

    planned       weights and caches that the plan counts, without the process
    tensor_bytes  of all tensors, weights and caches
    anonymous     growth of the process's anonymous memory, after a segment or draft passes
    free          what of that malloc kept, although it was free
    peak          growth of its resident memory at its highest, files that it maps included
    cached        of the parts' files that are left in the page cache
    """

    planned: int
    tensor_bytes: int
    anonymous: int
    free: int
    peak: int
    cached: int


class RandomBits(GroupedScheme):
    """Random codes of any weights, in int4's layout."""

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        return random_codes(self, *weight.shape)


def footprint(model: str, parts: Sequence[str], directory: Path, boards: int = 1, context: int = 4096,
              kv_cache: CacheBits = "16bit", layers: int | None = None) -> Footprint:
    """Measure the memory of ``parts`` of a catalogue model, all in one process.

    layers  of a shallower model, if given

    The parts are written below ``directory``, an empty one.
    """
    source = directory / model
    _write_source(model, source, layers)
    problem = problem_for(model_bytes(str(source), "int4", kv_cache=kv_cache), context, 1, boards)
    out, stages = directory / "sharded", max(1, boards - 1)
    lo, hi = ranges_for(problem.size.layers, stages, None)[0]
    planned = (problem.stage(hi - lo) if FIRST in parts else 0) + (problem.d0 if DRAFT in parts else 0)
    in_fresh_process(_write_parts, source, out, tuple(parts), stages, kv_cache)
    measured = in_fresh_process(_load, out, tuple(parts), problem.cached)
    return Footprint(planned, *measured, _in_page_cache(out))


def _write_source(model: str, source: Path, layers: int | None) -> None:
    """Write a checkpoint's directory without weights, its name that of the catalogue."""
    config = dict(known_models()[model].config)
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text("{}\n")


def _in_page_cache(directory: Path) -> int:
    files = [path for path in directory.rglob("*") if path.is_file()]
    output = subprocess.run(["fincore", "--bytes", "--noheadings", "--output", "RES", *files], check=True,
                            capture_output=True, text=True).stdout
    return sum(map(int, output.split()))


# ---- each of these runs in a process of its own ----------------------------------------------------


def _write_parts(source: Path, out: Path, parts: Sequence[str], stages: int, kv_cache: CacheBits) -> None:
    """Write a sharded model of which only ``parts`` exist, as on a board."""
    heads = []
    if DRAFT in parts:
        heads.append(source.with_name("head"))
        _write_head(source, heads[0])
    model = describe(OpenModel(source), RandomWeights(source), heads, source.name)
    recipe = recipe_for(model, "int4", kv_cache=kv_cache)
    recipe = replace(recipe, scheme=RandomBits(recipe.group), lm_head=RandomBits())
    plan = make_plan(model, recipe, ranges_for(model.layers, stages, None))
    with Journal(out, plan.request) as journal:  # the other parts count as written
        for part in plan.parts:
            for file in part.files if part.name not in parts else ():
                path = out / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
                path.open("r+b").truncate(plan.size(file))  # takes no space
                journal.add(PartFile(path=file.path.as_posix(), size=plan.size(file), sha256="0" * 64))
    run(plan, out)
    for part in plan.parts:
        if part.name not in parts:
            shutil.rmtree(out / part.name)


def _write_head(source: Path, directory: Path) -> None:
    """Write the draft head that the plan assumes, in 16 bits."""
    kind = DRAFT_KINDS[next(iter(known_models()[source.name].heads), "eagle2")]
    head = assumed_head(OpenModel(source).decoder, kind)
    if not isinstance(head, EagleHead | Eagle3Head):
        raise FlowspecError(f"the draft head of {source.name} is no EAGLE head, and is not made up here: "
                            f"measure a stage alone, with --part {FIRST}")
    head.embed_tokens = cast(nn.Embedding, nn.Identity())  # the target's are used
    fill_random(head, torch.bfloat16, torch.device("cpu"))
    if isinstance(head, EagleHead):
        save_head(head, directory, torch.bfloat16, with_embedding=False)
        return
    head.d2t = torch.zeros(head.config.draft_vocab_size, dtype=torch.int64)
    head.t2d = torch.arange(head.config.vocab_size) < head.config.draft_vocab_size
    save_head3(head, directory, torch.bfloat16)


def _load(out: Path, parts: Sequence[str], rows: int) -> tuple[int, int, int, int]:
    """Load the parts, and return ``tensor_bytes``, ``anonymous``, ``free`` and ``peak`` of a Footprint."""
    warm_up("int4")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, tensors = sizes(Path("/proc/self/status")), _tensor_bytes()
    manifest = Manifest.read(out)
    keep: list[object] = []
    if FIRST in parts:
        engine = StageEngine(load_shard(out, 0, manifest.stages, manifest.compute_dtype))
        keep.append(engine)
        fill_caches(engine, rows)
    if DRAFT in parts:
        models = DraftModels(out, manifest.compute_dtype)
        kind = next(kind for kind in ("eagle3", "eagle2") if OpenModel(out).draft(kind))
        models.pass_seconds(kind)  # loads the head
        home = out / DRAFT / DRAFT_KINDS[kind].directory
        keep += [models, _full_draft_cache(home, manifest.compute_dtype, rows)]
    if FIRST in parts:
        compute_behind(engine, rows)
    gc.collect()
    after = sizes(Path("/proc/self/status"))
    ctypes.CDLL(None).malloc_trim(0)
    trimmed = sizes(Path("/proc/self/status"))
    return (_tensor_bytes() - tensors, after["RssAnon"] - before["RssAnon"],
            after["RssAnon"] - trimmed["RssAnon"], after["VmHWM"] - before["VmRSS"])


def _tensor_bytes() -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in gc.get_objects()
                if issubclass(type(tensor), Tensor)  # isinstance would import lazy modules
                and tensor.device.type == "cpu"}
    return sum(storages.values())


def _full_draft_cache(head: Path, dtype: str, rows: int) -> TreeCache:
    """Return a cache with ``rows`` of text, as the drafter of the head in ``head`` would have."""
    config = head_config(HeadFiles(head))
    shape = CacheShape.from_config(config, 1, torch.empty(0, dtype=parse_dtype(dtype), device="cpu"))
    cache = TreeCache(shape)
    new = torch.zeros(_TEXT, 2, shape.kind.kv_heads, shape.kind.head_dim, dtype=shape.dtype)
    for _ in range(rows // _TEXT):
        cache.for_pass(cache.begin(_TEXT, [])).write(new, 0)
    return cache


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m microbench.shapes.memory",
                                     description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=sorted(known_models()))
    parser.add_argument("--boards", type=int, default=1)
    parser.add_argument("--part", choices=[FIRST, DRAFT], help="default: both, in one process")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--kv-cache", choices=["16bit", "int8"], default="16bit")
    parser.add_argument("--layers", type=int, help="of a shallower model, for less disk")
    parser.add_argument("--directory", type=Path, help="for the parts; default: where temporary files go")
    args = parser.parse_args(arguments)
    parts = [args.part] if args.part else [FIRST, DRAFT]
    try:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            figures = footprint(args.model, parts, Path(directory), args.boards, args.context,
                                args.kv_cache, args.layers)
    except FlowspecError as error:
        print(f"microbench.shapes.memory: error: {error}", file=sys.stderr)
        return error.exit_code
    title = f"{args.model}, {' and '.join(parts)}: "
    print_rows([
        (f"{title}weights and caches, planned", figures.planned / 1e6, "MB"),
        ("  of all tensors", figures.tensor_bytes / 1e6, "MB"),
        ("  growth of anonymous memory", figures.anonymous / 1e6, "MB"),
        ("    of which malloc keeps although it is free", figures.free / 1e6, "MB"),
        ("  growth of resident memory at its peak", figures.peak / 1e6, "MB"),
        ("  of the files, left in the page cache", figures.cached / 1e6, "MB"),
        ("  anonymous / planned", figures.anonymous / figures.planned, "x")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
