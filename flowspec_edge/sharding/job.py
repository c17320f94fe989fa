"""Carrying out a plan: files one after another, a few MB at a time, and the manifest when all are there.

Knows how to go on where an earlier run stopped.  Does not know how a model is laid out (``plan``).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.manifest import Manifest, Part, PartFile, Quantisation, sha256_of
from flowspec_edge.manifest import Source as ManifestSource
from flowspec_edge.modeldir import MANIFEST
from flowspec_edge.sharding.files import PARTIAL, Progress, copy_whole, write_whole, writing
from flowspec_edge.sharding.journal import NAME as JOURNAL
from flowspec_edge.sharding.journal import Journal
from flowspec_edge.sharding.plan import Plan, PlannedFile, TensorsFile, TextFile
from flowspec_edge.sharding.source import Linear
from flowspec_edge.sharding.writer import TensorFile
from flowspec_edge.stage.quant import slices


def finished(plan: Plan, out: Path) -> Manifest | None:
    """The manifest in ``out`` if an earlier run with the same request has finished; None if there is none.

    UsageError if ``out`` holds a sharded model of another request.
    """
    if not (out / MANIFEST).is_file():
        return None
    manifest = Manifest.read(out)
    if manifest.request != plan.request:
        raise UsageError(f"{out} holds a sharded model already, of another model or with other options: give "
                         "another --out")
    (out / JOURNAL).unlink(missing_ok=True)  # of a run that ended between the manifest and its own end
    return manifest


def run(plan: Plan, out: Path, progress: Progress | None = None) -> Manifest:
    """Write everything below ``out``; after an interruption the same call goes on.

    progress  is called with the bytes written, those of an earlier run included

    At any time no more than some tens of MB of the model are in memory.  UsageError for a directory that
    cannot be used, FlowspecError for a full disk and for weights that cannot be read or converted.
    """
    with Journal(out, plan.request) as journal:
        _require_room(plan, out, journal)
        for part in plan.parts:
            for file in part.files:
                _write(plan, file, out, journal, progress)
        manifest = _manifest(plan, journal.done)
        with writing(out):
            for leftover in out.rglob(f"*{PARTIAL}"):
                leftover.unlink()
        text = json.dumps(json.loads(manifest.model_dump_json()), indent=1) + "\n"
        write_whole(out / MANIFEST, text.encode())
        journal.remove()
    return Manifest.read(out)


def _write(plan: Plan, file: PlannedFile, out: Path, journal: Journal, progress: Progress | None) -> None:
    done = journal.done.get(file.path.as_posix())
    if done is not None:
        if progress is not None:
            progress(done.size)
        return
    path = out / file.path
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(file, TensorsFile):
        _write_tensors(plan, file, path, progress)
    elif isinstance(file, TextFile):
        write_whole(path, file.data)
        if progress is not None:
            progress(len(file.data))
    else:
        copy_whole(file.source, path, progress)
    journal.add(PartFile(path=file.path.as_posix(), size=path.stat().st_size, sha256=sha256_of(path)))


def _write_tensors(plan: Plan, file: TensorsFile, path: Path, progress: Progress | None) -> None:
    source, layout = plan.source, plan.layout(file)
    with TensorFile(path, layout, progress) as target:
        for name in file.plain:
            dtype = layout[name][1]
            for _, piece in source.weights.pieces(name):
                target.write(name, _cast(piece, dtype, name))
        for linear in file.packed:
            if source.imported is not None:
                _convert(plan, linear, target)
            else:
                _quantise(plan, linear, target)


def _quantise(plan: Plan, linear: Linear, target: TensorFile) -> None:
    """Slice by slice of rows: no more than a million weights at a time."""
    assert plan.recipe.scheme is not None
    name = f"{linear.prefix}.weight"
    rows = next(hi for _, hi in slices(linear.rows, linear.columns))
    for _, piece in plan.source.weights.pieces(name, rows):
        try:
            stored = plan.recipe.scheme.quantise(piece)
        except FlowspecError as error:
            raise FlowspecError(f"{plan.source.weights.directory}: tensor {name}: {error}") from error
        for suffix, tensor in stored.items():
            target.write(f"{linear.prefix}.{suffix}", tensor)


def _convert(plan: Plan, linear: Linear, target: TensorFile) -> None:
    """A matrix that others have quantised: its layouts cut by columns, so all of it at once, packed."""
    source = plan.source
    assert source.imported is not None
    names = source.imported.names(linear.prefix, source.weights)
    try:
        stored = source.imported.convert(source.weights.tensors(names), linear.rows, linear.columns)
    except FlowspecError as error:
        raise type(error)(f"{source.weights.directory}: {linear.prefix}: {error}") from error
    for suffix, tensor in stored.items():
        target.write(f"{linear.prefix}.{suffix}", tensor)


def _cast(piece: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """``piece`` in ``dtype``; FlowspecError for a value that was finite and is not any more."""
    cast = piece.to(dtype)
    if dtype == torch.float16 and piece.dtype != dtype and not torch.equal(cast.isfinite(), piece.isfinite()):
        raise FlowspecError(f"tensor {name} has values beyond fp16's 65504: use --dtype bf16")
    return cast


def _require_room(plan: Plan, out: Path, journal: Journal) -> None:
    """FlowspecError now, not after hours, if the rest does not fit on the disk."""
    files = [file for part in plan.parts for file in part.files]
    missing = sum(plan.size(file) for file in files if file.path.as_posix() not in journal.done)
    free = shutil.disk_usage(out).free
    if missing > free:
        raise FlowspecError(f"no room in {out}: {missing / 1e9:.2f} GB are to be written and "
                            f"{free / 1e9:.2f} GB are free: make room, and run the same command again")


def _manifest(plan: Plan, done: dict[str, PartFile]) -> Manifest:
    source, recipe = plan.source, plan.recipe
    quantisation = None
    if recipe.kind is not None:
        quantisation = Quantisation(kind=recipe.kind, group=recipe.group, kept=plan.kept)
    return Manifest(
        format=1, model_type=source.config.model_type, layers=source.layers,
        source=ManifestSource(name=source.name, config_sha256=source.config_sha256, revision=source.revision),
        hidden_width=source.config.hidden_size, vocabulary=source.config.vocab_size, ranges=plan.ranges,
        dtype=recipe.dtype, compute_dtype=recipe.compute, quantisation=quantisation, request=plan.request,
        parts={part.name: Part(files=tuple(done[file.path.as_posix()] for file in part.files),
                               parameters=part.parameters, weight_bytes=part.weight_bytes,
                               row_bytes=part.row_bytes) for part in plan.parts})


def total_size(plan: Plan) -> int:
    """Bytes that all files together will have, the manifest aside."""
    return sum(plan.size(file) for part in plan.parts for file in part.files)
