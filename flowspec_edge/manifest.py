"""The manifest of a sharded model: what was cut, how, and every file with its size and sha256.

Knows the file ``manifest.json`` and how a part is checked against it.  Does not know tensors; it is
read on boards and by the command line, and imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.modeldir import MANIFEST

FORMAT = 1
DRAFT = "draft"  # D0's part
DRAFT_TARGET = Path(DRAFT, "target")  # where in it the config, the tokenizer and lm_head lie
_BLOCK = 1 << 20

ComputeDtype = Literal["fp32", "bf16", "fp16"]
QuantKind = Literal["int4", "nf4", "fp4"]
ShardDtype = Literal["fp32", "bf16", "fp16", "int4", "nf4", "fp4"]
Count = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Progress = Callable[[int], None]  # called with the bytes done since the last call


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class PartFile(_Strict):
    """A file of a part; ``path`` is relative to the model's directory, with forward slashes."""

    path: str
    size: Bytes
    sha256: Sha256


class Part(_Strict):
    """What one device gets.

    parameters    of the model before quantisation; on D0 lm_head, embeddings and draft models
    weight_bytes  of all of them in memory, loaded in the compute dtype
    row_bytes     keys and values that one row of the text takes in this part's caches, likewise
    """

    files: tuple[PartFile, ...]
    parameters: Bytes
    weight_bytes: Bytes
    row_bytes: Bytes

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.size for file in self.files)


class Source(_Strict):
    """Where the weights came from; ``revision`` is the commit of a model from the hub."""

    name: str
    config_sha256: Sha256
    revision: str | None = None


class Quantisation(_Strict):
    """``kept``: the decoder layers' matrices that stay in 16 bit, since no group divides them."""

    kind: QuantKind
    group: Count
    kept: tuple[str, ...] = ()


class Manifest(_Strict):
    """``manifest.json``, and the directory it lies in.

    dtype    what was asked for; ``compute_dtype``: what activations, caches and 16-bit weights run in
    ranges   [lo, hi) of layers per stage, in order
    request  fingerprint of everything that decides what is written
    parts    "stage-1" … "stage-N" and "draft"
    """

    format: Literal[1]
    source: Source
    model_type: str
    layers: Count
    hidden_width: Count
    vocabulary: Count
    ranges: tuple[tuple[int, int], ...]
    dtype: ShardDtype
    compute_dtype: ComputeDtype
    quantisation: Quantisation | None
    request: Sha256
    parts: dict[str, Part]
    _directory: Path = PrivateAttr(default=Path())

    @classmethod
    def read(cls, directory: Path | str) -> Manifest:
        """The manifest of a sharded model.

        UsageError if there is none; FlowspecError if it is not one, or of another format.
        """
        path = Path(directory) / MANIFEST
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise UsageError(f"{directory} is not a sharded model: {MANIFEST} is missing; make one with: "
                             "flowspec models shard") from None
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        try:
            fields = json.loads(raw)
        except ValueError as error:
            raise FlowspecError(f"{path} is not valid JSON ({error}): copy it again") from error
        found = fields.get("format") if isinstance(fields, dict) else None
        if found != FORMAT:
            raise FlowspecError(f"{path} has format {found!r}, and this flowspec reads {FORMAT}: shard the "
                                "model again, or use the flowspec that wrote it")
        try:
            manifest = cls.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise FlowspecError(f"{path}: {where}: {first['msg']}") from error
        manifest._directory = Path(directory)
        return manifest

    @property
    def directory(self) -> Path:
        """Where it was read."""
        return self._directory

    @property
    def stages(self) -> int:
        return len(self.ranges)

    def part(self, name: str) -> Part:
        """UsageError if there is no part of this name."""
        if name not in self.parts:
            raise UsageError(f"{self._directory} has no part {name!r}, only {', '.join(self.parts)}")
        return self.parts[name]

    def check_stages(self, stages: int) -> None:
        """UsageError unless the model was cut into so many stages."""
        if stages != self.stages:
            raise UsageError(f"{self._directory} was cut into {self.stages} stages, not {stages}: use "
                             f"{self.stages}, or cut it again with: flowspec models shard --stages {stages}")

    def is_here(self, part: str) -> bool:
        """Whether the part's directory is there, whatever is in it: a board gets its own alone."""
        return (self._directory / part).is_dir()

    def check(self, part: str, progress: Progress | None = None) -> None:
        """Check every file of ``part``: sizes first, then contents.

        FlowspecError that names the first file which is missing, altered, or not in the manifest.
        """
        files = self.part(part).files
        home = self._directory / part
        for file in files:
            path = self._directory / file.path
            if not path.is_file():
                raise FlowspecError(f"{path} is missing: copy {home} again")
            if path.stat().st_size != file.size:
                raise FlowspecError(f"{path} has {path.stat().st_size} bytes, and {MANIFEST} says "
                                    f"{file.size}: copy {home} again")
        known = {self._directory / file.path for file in files}
        foreign = sorted(path for path in home.rglob("*") if not path.is_dir() and path not in known)
        if foreign:
            raise FlowspecError(f"{foreign[0]} is not in {MANIFEST}: remove it, or copy {home} again")
        for file in files:
            if sha256_of(self._directory / file.path, progress) != file.sha256:
                raise FlowspecError(f"{self._directory / file.path} has been altered: its sha256 is not the "
                                    f"one in {MANIFEST}; copy {home} again")

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        at = 0
        for lo, hi in self.ranges:
            if lo != at or hi <= lo:
                raise ValueError(f"ranges of layers must follow one another, and [{lo}, {hi}) does not")
            at = hi
        if at != self.layers:
            raise ValueError(f"the ranges end at layer {at} of {self.layers}")
        names = {*(stage_part(i) for i in range(len(self.ranges))), DRAFT}
        if set(self.parts) != names:
            raise ValueError(f"there must be the parts {', '.join(sorted(names))}")
        for name, part in self.parts.items():
            for file in part.files:
                pure = PurePosixPath(file.path)
                if pure.is_absolute() or ".." in pure.parts or len(pure.parts) < 2 or pure.parts[0] != name:
                    raise ValueError(f"{file.path!r} does not lie in {name}")
        return self


def stage_part(index: int) -> str:
    """The part of stage ``index``, which counts from 0: directories count from 1."""
    return f"stage-{index + 1}"


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """The sha256 of a file, in hexadecimal; FlowspecError if it cannot be read."""
    sha, block = hashlib.sha256(), bytearray(_BLOCK)
    view = memoryview(block)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                sha.update(view[:count])
                if progress is not None:
                    progress(count)
    except OSError as error:
        raise FlowspecError(f"cannot read {path}: {error.strerror}") from error
    return sha.hexdigest()
