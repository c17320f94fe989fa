"""Device and testbed profiles: times as TOML data, and the arithmetic of their curves."""

from __future__ import annotations

import json
import re
import shlex
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from flowspec_edge.errors import UsageError
from flowspec_edge.model.draft_kind import DraftKind
from flowspec_edge.model.draft_kinds import DRAFT_KINDS, PASS_TIME_SUFFIX, timed_kinds
from flowspec_edge.model.families import LLAMA
from flowspec_edge.util.resources import resource_dir
from flowspec_edge.util.terminal import did_you_mean
from flowspec_edge.util.tomlfile import Count, Misplaced, NotNegative, Positive, StrictModel, load_toml

# Kernel launches of stages and of D0 on torch 2.8, which is JetPack 6's, counted with 16 rows of one session
# (tests/stage/test_launches.py, tests/drafting/test_launches.py).  With a session more, log-probabilities or
# packed weights there are a few more.  Those of a layer are in its family's record (``model.families``).
GRAPH_LAYER_LAUNCHES = 6  # of a layer whose pieces are CUDA graphs; 4 without grouped heads
SPARSE_GRAPH_LAYER_LAUNCHES = 17  # with experts, and without theirs
EXPERT_LAUNCHES = 2  # of each expert that rows have chosen
SEGMENT_LAUNCHES = 18  # of a segment beside its layers: masks, positions, 4 uploads, the norm, a download
OUTPUT_LAUNCHES = 10  # lm_head and a greedy choice; 29 for a token sampled with top-p
# Of ranking by an earlier block; and its time in passes of an EAGLE head, of a Markov head of rank 256.
SCORE_LAUNCHES, BLOCK_SCORES = 15, 0.03

# How far rows of one segment choose the same experts: 0 = independently, 1 = all the same.  Measured, see
# docs/experiments/models.md.
CORRELATION = 0.22


class ModelShape(StrictModel):
    """The model that the times belong to."""

    layers: Count
    hidden_width: Count
    bytes_per_value: Count  # of a hidden state on the wire
    layer_mb: Positive | None = None  # size of one layer's weights on the device, in 10^6 bytes
    quantised: bool = False  # whether those weights have 4 bits


class StageCurve(StrictModel):
    """The time of a stage for a segment, by its rows and the cached context that each row sees.

    ``rows`` and ``ms`` are the corners of a piecewise linear curve for ``layers`` layers and an empty cache:
    flat below the first corner, extrapolated beyond the last.  ``context_ms``: what 1000 cached tokens add at
    each corner; ``overhead_ms``: added to every segment, whatever the layers.

    Of a model with experts, ``ms`` is the time if every row chooses by itself, and ``shared_ms`` if all rows
    choose the same; in between, by ``correlation``, as ``model.experts`` defines it: None for
    :data:`CORRELATION`.  Rows of several requests choose by themselves.
    """

    layers: Positive
    rows: Annotated[list[Positive], Field(min_length=1)]
    ms: Annotated[list[Positive], Field(min_length=1)]
    context_ms: list[NotNegative] = Field(default_factory=list)
    overhead_ms: NotNegative = 0.0
    shared_ms: list[Positive] = Field(default_factory=list)
    correlation: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _is_a_curve(self) -> StageCurve:
        if len(self.rows) != len(self.ms):
            raise ValueError(f"rows and ms must be equally long, not {len(self.rows)} and {len(self.ms)}")
        for name in ("context_ms", "shared_ms"):
            if (values := getattr(self, name)) and len(values) != len(self.rows):
                raise ValueError(f"rows and {name} must be equally long, "
                                 f"not {len(self.rows)} and {len(values)}")
        if any(b <= a for a, b in pairwise(self.rows)):
            raise ValueError("rows must increase")
        for name in ("ms", "context_ms", "shared_ms"):
            values = getattr(self, name)
            if any(b < a for a, b in pairwise(values)):
                raise ValueError(f"{name} must not fall as rows grow")
        return self

    def milliseconds(self, rows: float, context: int = 0, correlation: float | None = None, alike: float = 1.0
                     ) -> float:
        """Without the overhead; 0 for no rows.

        correlation  of these rows' experts; None: the curve's, for those pairs of rows that are ``alike``
        alike        share of the pairs of rows that belong to one request
        """
        if rows <= 0:
            return 0.0
        attention_ms = self._at(self.context_ms, rows) * context / 1e3 if self.context_ms else 0.0
        base_ms = self._at(self.ms, rows)
        if self.shared_ms:
            usual = CORRELATION if self.correlation is None else self.correlation
            share = usual * alike if correlation is None else correlation
            base_ms += share * (self._at(self.shared_ms, rows) - base_ms)
        return base_ms + attention_ms

    @property
    def rises(self) -> bool:
        """Whether the time grows at the last corner, by more than a measurement's noise."""
        return len(self.ms) > 1 and self.ms[-1] > 1.1 * self.ms[-2]

    def _at(self, values: list[float], rows: float) -> float:
        if rows <= self.rows[0] or len(self.rows) == 1:
            return values[0]
        right = min(bisect_right(self.rows, rows), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = values[right - 1], values[right]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


class Int4Cost(StrictModel):
    """A matrix product of ``rows`` with int4 weights, beside the same product with the profile's own weights.

    Both are piecewise linear, as in :class:`StageCurve`.
    """

    rows: Annotated[list[Positive], Field(min_length=1)]
    ms: Annotated[list[Positive], Field(min_length=1)]
    full_ms: Annotated[list[Positive], Field(min_length=1)]

    @model_validator(mode="after")
    def _are_curves(self) -> Int4Cost:
        for times in (self.ms, self.full_ms):
            StageCurve(layers=1, rows=self.rows, ms=times)
        return self

    def ratio(self, rows: float) -> float:
        """Return the time with int4 weights over that with the profile's own."""
        return StageCurve(layers=1, rows=self.rows, ms=self.ms).milliseconds(rows) / self.full(rows)

    def full(self, rows: float) -> float:
        """Return the time with the profile's own weights."""
        return StageCurve(layers=1, rows=self.rows, ms=self.full_ms).milliseconds(rows)


class DraftCost(StrictModel):
    """One forward pass of a draft model on D0, by kind; ``row_ms``: what each expanded node adds.

    A kind of draft model may bring along a time of its own, KIND_pass_ms.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, NotNegative]

    pass_ms: NotNegative
    lm_pass_ms: NotNegative
    row_ms: NotNegative = 0.0

    @model_validator(mode="before")
    @classmethod
    def _times_of_kinds(cls, values: Any) -> Any:
        valid_keys = [*cls.model_fields, *(kind.charged_as for kind in timed_kinds())]
        for key in values if isinstance(values, dict) else ():
            if key not in valid_keys and not (key.endswith(PASS_TIME_SUFFIX)
                                              and key.removesuffix(PASS_TIME_SUFFIX).isidentifier()):
                raise Misplaced(f"unknown key; {did_you_mean(key, valid_keys)}"
                                f"known here are {', '.join(valid_keys)}", key)
        return values


class LmHeadCost(StrictModel):
    """lm_head on a segment's rows on D0; ``row_ms``: what each row adds to D0's work."""

    ms: NotNegative
    row_ms: NotNegative = 0.0


class LinkCost(StrictModel):
    """One way, between neighbours."""

    mbps: Positive  # 10^6 bits a second
    latency_ms: NotNegative


class CollectiveCost(StrictModel):
    """Costs of collectives, besides the bytes, of a group of devices that share every layer."""

    step_ms: NotNegative = 0.0  # per ring step: every device sends to the next and waits


class HostCost(StrictModel):
    """D0's own work for one output: accept, prune, merge, build a segment, encode."""

    bookkeeping_ms: NotNegative = 0.0


class LaunchCost(StrictModel):
    """The CPU time that the host takes to launch a kernel on the GPU.  The profile's other times do not include it.

    While the GPU computes, the host launches the layers that follow.  These launches cost only the time by which
    they take longer than the GPU.  Other launches are exposed, and their whole time is added: those of a segment
    before and after its layers, and all those of a draft pass and of an output, because D0 waits for each result.
    """

    us: NotNegative  # 10^-6 s
    layer: Count = LLAMA.launches  # launches of a decoder layer of the profile's model
    experts: Count | None = None  # of a decoder layer, if it has experts; ``layer`` omits their launches
    chosen: Count | None = None  # experts that each row chooses
    pass_graphs: bool = False  # whether draft passes are CUDA graphs

    def per_layer(self, rows: int) -> float:
        """Return launches of a layer for ``rows`` that choose experts independently."""
        if not self.experts or not self.chosen:
            return self.layer
        return self.layer + EXPERT_LAUNCHES * self.experts * (1 - (1 - self.chosen / self.experts) ** rows)

    def per_pass(self, kind: str) -> tuple[int, int]:
        """Return launches within the layers of a small model, and others."""
        draft = DRAFT_KINDS[kind]
        if self.pass_graphs and draft.graph_launches is not None:
            return 0, draft.graph_launches
        return draft.launches

    def added(self, gpu_s: float, hidden: float, exposed: int) -> float:
        """Seconds beside ``gpu_s``, the GPU's own, during which the ``hidden`` launches run."""
        return max(0.0, hidden * self.us * 1e-6 - gpu_s) + exposed * self.us * 1e-6

    def without(self, ms: float, exposed: int) -> float:
        """Measured milliseconds less those of ``exposed`` launches; never less than a hundredth."""
        return max(0.01 * ms, ms - exposed * self.us * 1e-3)


class Memory(StrictModel):
    """In MB (10^6 bytes)."""

    total_mb: Positive
    usable_mb: Positive  # free for a stage's or D0's process, with the system running
    process_mb: NotNegative  # of such a process without weights and cache: interpreter, kernels
    gb_per_s: Positive | None = None  # 10^9 bytes a second that a decoder, or a large copy, reads
    gb_per_s_range: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = None  # if not known

    @model_validator(mode="after")
    def _fits(self) -> Memory:
        if self.usable_mb > self.total_mb:
            raise ValueError(f"usable_mb {self.usable_mb:g} is more than total_mb {self.total_mb:g}")
        if self.gb_per_s_range and not (self.gb_per_s and self.gb_per_s_range[0] <= self.gb_per_s
                                        <= self.gb_per_s_range[1]):
            raise ValueError(f"gb_per_s {self.gb_per_s} is not within gb_per_s_range {self.gb_per_s_range}")
        return self


class Conditions(StrictModel):
    """How a profile was measured, or when its estimates hold; for information, and for the commands after a plan."""

    date: str = ""
    machine: str = ""
    model: str = ""
    dtype: str = ""
    device: str = ""
    threads: Annotated[int, Field(ge=0)] = 0
    power_mode: str = ""
    temperature_c: float | None = None  # the hottest zone, at the end
    clocks_mhz: dict[str, float] = Field(default_factory=dict)
    peer: str = ""  # at the other end of the measured link


class Profile(StrictModel):
    name: str
    summary: str
    kind: Literal["testbed", "device"]
    provenance: Literal["measured", "published", "estimated"]
    source: str
    model: ModelShape
    stage: StageCurve
    draft: DraftCost
    lm_head: LmHeadCost
    link: LinkCost
    host: HostCost = HostCost()
    collective: CollectiveCost = CollectiveCost()
    int4: Int4Cost | None = None
    launch: LaunchCost | None = None
    memory: Memory | None = None
    conditions: Conditions | None = None
    boards: Count | None = None  # of a testbed with this many, D0 included; None: any number

    def stage_seconds(self, rows: int, layers: float, context: int = 0, devices: int = 1,
                      correlation: float | None = None, alike: float = 1.0) -> float:
        """Return the time of a stage for ``rows`` rows.

        layers              may be a fraction
        context             tokens in the cache
        devices             that share every layer evenly; each launches kernels for all layers
        correlation, alike  as for :meth:`StageCurve.milliseconds`
        """
        if rows <= 0:
            return 0.0
        in_layers = self.stage.milliseconds(rows, context, correlation, alike) * (layers / self.stage.layers)
        seconds = (self.stage.overhead_ms + in_layers) * 1e-3 / devices
        if self.launch is None:
            return seconds
        return seconds + self.launch.added(in_layers * 1e-3 / devices, layers * self.launch.per_layer(rows),
                                           SEGMENT_LAUNCHES)

    def draft_seconds(self, kind: str, nodes: int = 1, scored: bool = False) -> float:
        """One pass of a draft model of ``kind`` that expands ``nodes``.

        ``scored``: by an earlier pass of a block drafter.
        """
        draft = DRAFT_KINDS[kind]
        times = BLOCK_SCORES if scored and draft.is_block else draft.passes
        cost = times * self.pass_ms(draft) if draft.charged_as else 0.0
        seconds = (cost + self.draft.row_ms * nodes) * 1e-3
        launches = (0, SCORE_LAUNCHES) if scored else self.launch and self.launch.per_pass(kind)
        return seconds + (self.launch.added(seconds, *launches) if self.launch and launches else 0.0)

    def pass_ms(self, draft: DraftKind) -> float:
        """Return the time that a pass of ``draft`` takes ``passes`` times.

        Estimated if it is the kind's own, and the profile lacks it.
        """
        measured: float | None = getattr(self.draft, draft.charged_as, None)
        if measured is None:
            return draft.layers * self.stage.milliseconds(1) / self.stage.layers + self.lm_head.ms
        return measured

    def verify_seconds(self, rows: int, outputs: int = 1) -> float:
        """Return D0's time for ``outputs`` that came together.

        It counts bookkeeping for each output, and lm_head once for all ``rows``, if there are any.
        """
        head = self.lm_head.ms + self.lm_head.row_ms * rows if rows else 0.0
        seconds = (self.host.bookkeeping_ms * outputs + head) * 1e-3
        return seconds + (self.launch.added(seconds, 0, OUTPUT_LAUNCHES) if self.launch and rows else 0.0)

    def link_seconds(self, size: int) -> tuple[float, float]:
        """(time that ``size`` bytes occupy the link, latency after that)."""
        return size * 8 / (self.link.mbps * 1e6), self.link.latency_ms * 1e-3

    def with_link(self, **values: float) -> Profile:
        """Return a copy in which every link has these values of ``LinkCost``."""
        link = LinkCost.model_validate({**self.link.model_dump(), **values})
        return self.model_copy(update={"link": link})

    def check_stages(self, stages: int) -> None:
        """Raise UsageError for more stages than layers, or another number than the testbed has."""
        if self.boards and self.boards != stages + 1:
            raise UsageError(f"{self.name} has {self.boards} boards, one of which drafts: use --stages "
                             f"{self.boards - 1}, or leave --stages out, instead of {stages}")
        if stages > self.model.layers:
            raise UsageError(f"{stages} stages are more than the {self.model.layers} layers of profile "
                             f"{self.name}: use fewer stages, or another profile")


class MixedBoards(Profile):
    """A testbed of several kinds of boards; the profile itself is D0's.

    verify  the profiles of V1…VN
    layers  that each of them has
    """

    verify: tuple[Profile, ...]
    layers: tuple[int, ...]

    def with_link(self, **values: float) -> Profile:
        verify = tuple(profile.with_link(**values) for profile in self.verify)
        return super().with_link(**values).model_copy(update={"verify": verify})


def read_profile(text: str) -> Profile:
    """Return a profile from the JSON of its ``model_dump_json``."""
    return (MixedBoards if "verify" in json.loads(text) else Profile).model_validate_json(text)


def profile_names() -> list[str]:
    return sorted(path.stem for path in resource_dir("profiles").glob("*.toml"))


def load_profile(name_or_path: str) -> Profile:
    """Return a bundled profile by name, or a TOML file by path."""
    if name_or_path in profile_names():
        path = resource_dir("profiles") / f"{name_or_path}.toml"
    elif name_or_path.endswith(".toml") or "/" in name_or_path:
        path = Path(name_or_path)
        if path.suffix == ".toml" and not path.exists():
            raise UsageError(f"there is no profile {path}: see flowspec profiles, or measure a board: "
                             f"flowspec device profile --out {shlex.quote(str(path))}")
    else:
        raise UsageError(f"no profile {name_or_path!r}; {did_you_mean(name_or_path, profile_names())}"
                         f"there are {', '.join(profile_names())}, "
                         "or give the path of a .toml file")
    return load_toml(path, Profile)


def pass_titles() -> dict[str, str]:
    """Whose the times of passes in ``DraftCost`` are."""
    return {"pass_ms": "EAGLE head", "lm_pass_ms": "small draft model",
            **{kind.charged_as: kind.title for kind in timed_kinds()}}


_WIDTH = 110
_COMMENTS = {
    "us": {"launch": "of a kernel on the GPU; no other time of this file contains what launches add"},
    "layer": {"launch": "launches of a decoder layer"},
    "experts": {"launch": "of a layer; those that rows choose are launched beside"},
    "pass_graphs": {"launch": "whether draft passes are CUDA graphs"},
    "layers": {"stage": "of the curve"},
    "bytes_per_value": {"model": "of a hidden state on the wire"},
    "layer_mb": {"model": "weights of one layer"},
    "quantised": {"model": "to 4 bits"},
    "full_ms": {"int4": "the same product with the profile's own weights"},
    "rows": {"stage": "of a segment; one ms and one context_ms for each"},
    "context_ms": {"stage": "added by 1000 cached tokens"},
    "overhead_ms": {"stage": "of every segment, for any number of layers"},
    "shared_ms": {"stage": "if all rows chose the same experts; ms: each by itself"},
    "correlation": {"stage": "of the experts of a segment's rows: 0 for independent, 1 for the same"},
    "ms": {"lm_head": "for an output", "int4": "a product with int4 weights"},
    "row_ms": {"draft": "added by each node", "lm_head": "added by each row, bookkeeping included"},
    "mbps": {"link": "10^6 bits a second"},
    "bookkeeping_ms": {"host": "D0's own work for one output"},
    "step_ms": {"collective": "a step of a ring, without its bytes"},
    "usable_mb": {"memory": "free for the process of a stage or of D0"},
    "process_mb": {"memory": "of such a process beside weights and cache"},
    "gb_per_s": {"memory": "10^9 bytes read a second"},
    "temperature_c": {"conditions": "the hottest zone at the end of the measurement"},
    "peer": {"conditions": "the other end of the measured link"},
}
_EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})


def render(profile: Profile) -> str:
    """Return the text of a TOML file with comments."""
    data = profile.model_dump()
    lines = [f"{key} = {_long(value) if key == 'source' else _value(value)}" for key, value in data.items()
             if not isinstance(value, Mapping) and value is not None]
    for table, values in data.items():
        if isinstance(values, Mapping):
            lines += ["", f"[{table}]"]
            lines += [_line(table, key, value) for key, value in values.items() if value not in _EMPTY_VALUES]
    return "\n".join(lines) + "\n"


def _line(table: str, key: str, value: Any) -> str:
    comment = pass_titles().get(key) if table == "draft" else None
    comment = comment or _COMMENTS.get(key, {}).get(table)
    return f"{key} = {_value(value)}" + (f"  # {comment}" if comment else "")


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_text(str(key))} = {_value(inner)}" for key, inner in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    """Return a JSON string is valid TOML, except for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _long(value: str) -> str:
    """Each line of the multi-line string ends with a backslash, which joins it to the next."""
    lines = [""]
    for word in re.findall(r"^ +|[^ ]+ *", _text(value)[1:-1]):
        if lines[-1] and len(lines[-1]) + len(word) > _WIDTH - 1:
            lines.append("")
        lines[-1] += word
    return '"""\n' + "\\\n".join(lines) + '"""'
