"""``manifest.json`` of a sharded model, without torch or transformers."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, model_validator

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.weights.located import MANIFEST, altered
from flowspec_edge.util.bounded_read import Progress, parse_json, read_bytes, sha256_of
from flowspec_edge.util.terminal import no_control_characters
from flowspec_edge.util.tomlfile import Count, StrictModel

FORMAT = 1
DRAFT = "draft"  # D0's part
DRAFT_TARGET = Path(DRAFT, "target")  # the config, the tokenizer and lm_head

ComputeDtype = Literal["fp32", "bf16", "fp16"]
RunDtype = Literal["fp32", "bf16", "fp16", "mixed"]  # mixed: fp32, and matrices in 16 bits, on CPUs
QuantKind = Literal["int4", "nf4", "fp4"]
ShardDtype = Literal["fp32", "bf16", "fp16", "int4", "nf4", "fp4"]
HeadBits = Literal["16bit", "int8", "int4"]  # of lm_head; 16bit: unchanged, and draft heads too
CacheBits = Literal["16bit", "int8"]  # of the stages' keys and values; 16bit: the compute dtype
Bytes = Annotated[int, Field(ge=0)]
Name = Annotated[str, AfterValidator(no_control_characters)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

# A layer with a window keeps this many further rows, so that a text can be cut shorter by as many.  It keeps up to
# as many again before it moves its rows together.
WINDOW_SLACK = 64
SESSIONS = 2  # that stages hold, for each request at once: its own, and a retained prefix


def window_text(window: int) -> int:
    """Rows of its text that a session's layer holds at most: the newest, and a window before a snapshot."""
    return 2 * (window - 1) + 2 * WINDOW_SLACK


def reserved(window: int | None, rows: int, requests: int, tentative: int) -> int:
    """Return for how many rows a layer has memory in a cache of ``rows`` rows.

    ``window``: rows of the layer's window; None: it reads all rows.

    ``tentative``: uncommitted ones of each of ``requests`` requests at once (0: any number).
    """
    if window is None or not requests:
        return rows
    return min(rows, requests * (SESSIONS * window_text(window) + tentative))


class PartFile(StrictModel):
    """A file of a part; ``path`` is relative to the model's directory, with forward slashes."""

    path: str
    size: Bytes
    sha256: Sha256


class ShardPart(StrictModel):
    """What one device holds of a sharded model.

    parameters    before quantisation; on D0 of lm_head, embeddings and draft models
    weight_bytes  in memory, in the compute dtype; token embeddings stay in their file
    row_bytes     of one row's keys and values in this part's caches, in the compute dtype
    windows       how many of these bytes are in layers that see only so many rows
    states        of recurrent layers, for each request at once, however long its text is
    """

    files: tuple[PartFile, ...]
    parameters: Bytes
    weight_bytes: Bytes
    row_bytes: Bytes
    windows: dict[int, Bytes] = Field(default_factory=dict)
    states: Bytes = 0

    def cache_bytes(self, rows: int, requests: int = 0, tentative: int = 0) -> int:
        """Return the bytes of caches of ``rows`` rows for ``requests`` requests at once.

        ``reserved`` says how many rows a layer with a window has.  If ``requests`` is 0, their number is not
        limited, and the states of one request count.
        """
        less = sum(size * (rows - reserved(window, rows, requests, tentative))
                   for window, size in self.windows.items())
        return rows * self.row_bytes - less + max(1, requests) * self.states

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class ModelOrigin(StrictModel):
    """Where a model is from; ``revision``: a commit on the hub."""

    name: str
    config_sha256: Sha256
    revision: str | None = None


class Quantisation(StrictModel):
    """How a sharded model's matrices are quantised.

    kept  matrices of decoder layers that stay in 16 bits: no group divides them, or a GGUF file has them so
    int8  those in 8 bits, in the groups of an int8 lm_head; without ``.weight``
    """

    kind: QuantKind
    group: Count
    kept: tuple[Name, ...] = ()
    int8: tuple[Name, ...] = ()

    @property
    def stored(self) -> str:
        return f"{self.kind} and int8" if self.int8 else self.kind


class HeadQuantisation(StrictModel):
    """How lm_head is quantised.  If it is, draft heads are brought to 4 bits when they are loaded.

    ``group``: the most weights that share a scale.
    """

    kind: Literal["int8", "int4"]
    group: Count


def types_text(dtype: str, weights: str | None) -> str:
    """Name the types in which a model is and computes.

    ``weights``: as :attr:`Manifest.stored`, None: not known.
    """
    if dtype == "mixed":
        dtype, weights = "fp32", "in 16 bits" if weights == "mixed" else weights
    if weights is None:
        return f"computed in {dtype}"
    if weights == dtype:
        return f"weights and arithmetic in {dtype}"
    return f"weights {weights}, computed in {dtype}"


class Manifest(StrictModel):
    """The description of a sharded model.

    dtype          as requested
    compute_dtype  of activations, caches and 16-bit weights
    lm_head        None: stored like the embeddings
    candidates     of D0's candidate head (``model.candidates``); 0: drafts read all of lm_head
    request        fingerprint of everything that determines the output
    parts          "stage-1" … "stage-N" and "draft"
    """

    format: Literal[1]
    source: ModelOrigin
    model_type: str
    layers: Count
    hidden_width: Count
    vocabulary: Count
    ranges: tuple[tuple[int, int], ...]
    dtype: ShardDtype
    compute_dtype: ComputeDtype
    quantisation: Quantisation | None
    lm_head: HeadQuantisation | None = None
    candidates: Annotated[int, Field(ge=0)] = 0
    kv_cache: CacheBits = "16bit"
    request: Sha256
    parts: dict[str, ShardPart]
    _directory: Path = PrivateAttr(default=Path())

    @classmethod
    def read(cls, directory: Path | str) -> Manifest:
        """Read a manifest; UsageError if there is none, FlowspecError if it is invalid or of another format."""
        path = Path(directory) / MANIFEST
        if not path.exists():
            raise UsageError(f"{directory} is not a sharded model: {MANIFEST} is missing; make one with: "
                             "flowspec models shard")
        manifest = cls.parse(read_bytes(path), path)
        manifest._directory = Path(directory)
        return manifest

    @classmethod
    def parse(cls, raw: bytes, path: Path) -> Manifest:
        """Parse a manifest; FlowspecError, which names ``path``, if it is invalid or of another format."""
        fields = parse_json(raw, str(path))
        version = fields.get("format") if isinstance(fields, dict) else None
        if version != FORMAT:
            raise FlowspecError(f"{path} has format {version!r}, and this flowspec reads {FORMAT}: shard the "
                                "model again, or use the flowspec that wrote it")
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            field_path = ".".join(map(str, first["loc"])) or "the file"
            raise FlowspecError(f"{path}: {field_path}: {first['msg']}") from error

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def stages(self) -> int:
        return len(self.ranges)

    @property
    def stored(self) -> str:
        """What is stored in which type, such as "int4, lm_head int8, KV cache int8".

        What is not named is in the compute dtype.
        """
        return ", ".join([self.quantisation.stored if self.quantisation else self.compute_dtype,
                          *([f"lm_head {self.lm_head.kind}"] if self.lm_head else []),
                          *([f"KV cache {self.kv_cache}"] if self.kv_cache != "16bit" else [])])

    def part(self, name: str) -> ShardPart:
        if name not in self.parts:
            raise UsageError(f"{self._directory} has no part {name!r}, only {', '.join(self.parts)}")
        return self.parts[name]

    def check_stages(self, stages: int) -> None:
        if stages != self.stages:
            raise UsageError(f"{self._directory} was sharded into {self.stages} stages, not {stages}: use "
                             f"{self.stages}, or shard it again: flowspec models shard --stages {stages}")

    def has_part(self, part: str) -> bool:
        """Whether the part's directory exists: a board has only its own part."""
        return (self._directory / part).is_dir()

    def check(self, part: str, progress: Progress | None = None) -> None:
        """Raise FlowspecError for the first file that is missing, altered, or not in the manifest."""
        for path, sha256 in self.check_sizes(part).items():
            if sha256_of(path, progress) != sha256:
                raise altered(path)

    def check_sizes(self, part: str) -> dict[Path, str]:
        """Return the sha256 that each file must have, without reading any.

        FlowspecError that names the first file that is missing, of another size, or not in the manifest.
        """
        home = self._directory / part
        files = {self._directory / file.path: file for file in self.part(part).files}
        for path, file in files.items():
            if not path.is_file():
                raise FlowspecError(f"{path} is missing: copy {home} again")
            if path.stat().st_size != file.size:
                raise FlowspecError(f"{path} has {path.stat().st_size} bytes, and {MANIFEST} says "
                                    f"{file.size}: copy {home} again")
        foreign = sorted(path for path in home.rglob("*") if not path.is_dir() and path not in files)
        if foreign:
            raise FlowspecError(f"{foreign[0]} is not in {MANIFEST}: remove it, or copy {home} again")
        return {path: file.sha256 for path, file in files.items()}

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
    """Return the part of stage ``index`` (from 0); directories count from 1."""
    return f"stage-{index + 1}"
