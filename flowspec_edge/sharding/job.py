"""Writes a plan: one file after another, a few MB at a time, and the manifest last.

A journal in the output directory makes runs resumable: its first line is the request, each further line a
complete, synced file.  A last line torn by a power failure is ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.manifest import (
    HeadQuantisation,
    Manifest,
    ModelOrigin,
    PartFile,
    Quantisation,
    ShardPart,
)
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.weights.located import MANIFEST, display_path
from flowspec_edge.sharding.plan import PlannedFile, ShardingPlan, TensorsFile, TextFile, is_imported
from flowspec_edge.sharding.source import Linear, SourceModel
from flowspec_edge.sharding.writer import TensorFile, copy_file, partial_of, writing
from flowspec_edge.stage.output_head import PREFIX as HEAD_PREFIX
from flowspec_edge.stage.quant.base import Scheme, slices
from flowspec_edge.stage.quant.sizes import DEFAULT_GROUP
from flowspec_edge.util.bounded_read import Progress, sha256_of
from flowspec_edge.util.files import PARTIAL, sync_directory, write_atomically
from flowspec_edge.util.threads import one_thread

JOURNAL = "sharding.journal"


def finished(plan: ShardingPlan, out: Path) -> Manifest | None:
    """Return the manifest of an earlier run; None if unfinished, UsageError if ``out`` holds another request's."""
    manifest = OpenModel(out).manifest
    if manifest is None:
        return None
    if manifest.request != plan.request:
        raise UsageError(f"{out} already holds a sharded model that was made from another model or with other options: "
                         "give another --out")
    (out / JOURNAL).unlink(missing_ok=True)  # of a run that was interrupted after it wrote the manifest
    return manifest


def run(plan: ShardingPlan, out: Path, progress: Progress | None = None) -> Manifest:
    """Write everything below ``out``; resumable by the same call.

    ``progress`` gets the bytes written, including those of an earlier run.  UsageError for an unusable
    directory, FlowspecError for a full disk and for weights that cannot be read or converted.
    """
    # To repack moves bytes: a second thread costs more than it gives, beside other work seven times as much.
    threads = one_thread() if is_imported(plan.source, plan.recipe) else nullcontext()
    with Journal(out, plan.request) as journal, threads:
        _require_room(plan, out, journal)
        for part in plan.parts:
            for file in part.files:
                _write(plan, file, out, journal, progress)
        manifest = _manifest(plan, journal.done)
        with writing(out):
            for leftover in out.rglob(f"*{PARTIAL}"):
                leftover.unlink()
            text = json.dumps(json.loads(manifest.model_dump_json()), indent=1) + "\n"
            write_atomically(out / MANIFEST, text)
        journal.remove()
    return OpenModel(out).require_manifest()


def _write(plan: ShardingPlan, file: PlannedFile, out: Path, journal: Journal, progress: Progress | None
           ) -> None:
    part_file = journal.done.get(file.path.as_posix())
    if part_file is not None:
        if progress is not None:
            progress(part_file.size)
        return
    path = out / file.path
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(file, TensorsFile):
        _write_tensors(plan, file, path, progress)
    elif isinstance(file, TextFile):
        with writing(path):
            write_atomically(path, file.data)
        if progress is not None:
            progress(len(file.data))
    else:
        copy_file(file.source, path, progress)
    journal.add(PartFile(path=file.path.as_posix(), size=path.stat().st_size, sha256=sha256_of(path)))


def _write_tensors(plan: ShardingPlan, file: TensorsFile, path: Path, progress: Progress | None) -> None:
    source, layout = plan.source, plan.layout(file)
    with TensorFile(path, layout, progress) as target:
        for name in file.plain:
            dtype = layout[name][1]
            for _, piece in source.weights.pieces(name):
                target.write(name, _cast(piece, dtype, name))
        for linear in file.packed:
            if is_imported(source, plan.recipe):
                _convert(plan, linear, target)
            else:
                _quantise(source, f"{linear.prefix}.weight", plan.recipe.scheme, linear.prefix, target)
        if file.head:
            _quantise(source, file.head, plan.recipe.lm_head, HEAD_PREFIX, target)


def _quantise(source: SourceModel, name: str, scheme: Scheme | None, prefix: str, target: TensorFile) -> None:
    """Write the source's tensor ``name`` as ``prefix``, quantised by ``scheme``."""
    assert scheme is not None
    rows = next(hi for _, hi in slices(*source.tensors[name].shape))
    for _, piece in source.weights.pieces(name, rows):
        try:
            stored = scheme.quantise(_computable(piece))
        except FlowspecError as error:
            raise FlowspecError(f"{display_path(source.weights.directory)}: tensor {name}: {error}") from error
        for suffix, tensor in stored.items():
            target.write(f"{prefix}.{suffix}", tensor)


def _convert(plan: ShardingPlan, linear: Linear, target: TensorFile) -> None:
    """Write a matrix of the source that is in 4 bits already, or a GGUF file's in other blocks."""
    source = plan.source
    assert source.imported is not None
    try:
        for stored in source.imported.pieces(linear.prefix, source.weights, linear.rows, linear.columns):
            for suffix, tensor in stored.items():
                target.write(f"{linear.prefix}.{suffix}", tensor)
    except FlowspecError as error:
        raise type(error)(f"{display_path(source.weights.directory)}: {linear.prefix}: {error}") from error


def _computable(piece: Tensor) -> Tensor:
    """Float8 in 16 bits, since little is computed with it."""
    return piece.half() if piece.dtype.itemsize == 1 else piece


def _cast(piece: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Cast a tensor; FlowspecError for a finite value that overflows."""
    piece = _computable(piece)
    cast = piece.to(dtype)
    if dtype == torch.float16 and piece.dtype != dtype and not torch.equal(cast.isfinite(), piece.isfinite()):
        raise FlowspecError(f"tensor {name} has values beyond fp16's 65504: use --dtype bf16")
    return cast


def _require_room(plan: ShardingPlan, out: Path, journal: Journal) -> None:
    """Raise FlowspecError if the rest does not fit on the disk, before hours of work."""
    files = [file for part in plan.parts for file in part.files]
    missing = sum(plan.size(file) for file in files if file.path.as_posix() not in journal.done)
    free = shutil.disk_usage(out).free
    if missing > free:
        raise FlowspecError(f"no room in {out}: {missing / 1e9:.2f} GB are to be written and "
                            f"{free / 1e9:.2f} GB are free: make room, and run the same command again")


def _manifest(plan: ShardingPlan, done: dict[str, PartFile]) -> Manifest:
    source, recipe = plan.source, plan.recipe
    quantisation, head = None, None
    if recipe.kind is not None:
        quantisation = Quantisation(kind=recipe.kind, group=recipe.group, kept=plan.unquantised,
                                    int8=plan.int8)
    if recipe.lm_head is not None:
        head = HeadQuantisation(kind=cast(Any, recipe.lm_head.kind), group=DEFAULT_GROUP)
    return Manifest(
        format=1, model_type=source.config.model_type, layers=source.layers,
        source=ModelOrigin(name=source.name, config_sha256=source.config_sha256, revision=source.revision),
        hidden_width=source.config.hidden_size, vocabulary=source.config.vocab_size, ranges=plan.ranges,
        dtype=recipe.dtype, compute_dtype=recipe.compute, quantisation=quantisation, lm_head=head,
        kv_cache=recipe.kv_cache, candidates=recipe.candidates,
        request=plan.request,
        parts={part.name: ShardPart(files=tuple(done[file.path.as_posix()] for file in part.files),
                               parameters=part.parameters, weight_bytes=part.weight_bytes,
                               row_bytes=part.row_bytes, windows=part.windows,
                               states=part.states) for part in plan.parts})


def total_size(plan: ShardingPlan) -> int:
    """Bytes of all files except the manifest."""
    return sum(plan.size(file) for part in plan.parts for file in part.files)


class Journal:
    """A context manager for the journal of ``directory``, which it creates if needed.

    UsageError if the directory holds something else, another request, or another process's sharding.
    """

    def __init__(self, directory: Path, request: str) -> None:
        self._path = directory / JOURNAL
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            foreign = sorted(path.name for path in directory.iterdir())
        if foreign and JOURNAL not in foreign:
            raise UsageError(f"{directory} is not empty (it holds {foreign[0]}) and has no unfinished "
                             "sharding: give another --out")
        with writing(self._path):
            self._file = self._path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UsageError(f"another process is writing {directory}: wait for it") from None
        try:
            self.done = self._read(request)
        except BaseException:
            self._file.close()
            raise

    def add(self, file: PartFile) -> None:
        self._append(file.model_dump())
        self.done[file.path] = file

    def remove(self) -> None:
        with writing(self._path):
            self._path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._file.close()

    def _read(self, request: str) -> dict[str, PartFile]:
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        torn = len(lines.pop())
        if torn:
            with writing(self._path):
                self._file.truncate(self._file.tell() - torn)
        if not lines:
            self._append({"request": request})
            with writing(self._path):
                sync_directory(self._path.parent)
            return {}
        try:
            first = json.loads(lines[0])
            files = [PartFile.model_validate_json(line) for line in lines[1:]]
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self._path} is damaged: delete it; the files it lists are written again"
                             ) from error
        if not isinstance(first, dict) or first.get("request") != request:
            raise UsageError(f"{self._path.parent} holds an unfinished sharding of another model or with "
                             "other options: run that command again, or give another --out")
        return {file.path: file for file in files if self._is_there(file)}

    def _is_there(self, file: PartFile) -> bool:
        path = self._path.parent / file.path
        return path.is_file() and path.stat().st_size == file.size and not partial_of(path).exists()

    def _append(self, entry: dict[str, object]) -> None:
        with writing(self._path):
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
