"""Options that several commands share, and the defaults of ``--stages``, ``--dtype`` and ``--device`` for a model.

Torch is imported only for a GPU.

A hidden option of a panel is for rare needs: ``--help-all`` shows it.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flowspec_edge.errors import UsageError
from flowspec_edge.model.chat import check_values
from flowspec_edge.model.config import cache_values
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.util import procfs

if TYPE_CHECKING:
    from flowspec_edge.device_profile import Profile
    from flowspec_edge.util.torchdevice import TorchGpu

Clock = Literal["wall", "virtual"]
ShardedDtype = Literal["fp32", "bf16", "fp16"]  # of sharded models, and of boards
Dtype = Literal["fp32", "bf16", "fp16", "mixed"]
DtypeChoice = Literal["auto", "fp32", "bf16", "fp16", "mixed"]
MOST_STAGES = 256
MOST_AT_ONCE = 1024  # requests that share the stages
MOST_TOKENS = 1 << 24
MOST_REPEATS = 1_000_000  # of anything that is measured, drawn or printed
MOST_SECONDS = 1e7
_MOST_DIGITS = 9  # of a whole number in a list
# The panels of --help.
MODEL, STRATEGY, SAMPLING, TIME = "Model", "Strategy", "Sampling", "Devices and time"
PROMPTS, OUTPUT, SERVICE = "Prompts", "Output", "Service"


def _check_stages(context: typer.Context, value: int) -> int:
    source = context.get_parameter_source("stages")
    if source is not None and source.name == "COMMANDLINE" and not 1 <= value <= MOST_STAGES:
        raise typer.BadParameter(f"{value} is not {'at least 1' if value < 1 else f'at most {MOST_STAGES}'}")
    return value


def not_nan(value: float | None) -> float | None:
    """Reject NaN, which passes the check of a smallest or largest value."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


def torch_device_name(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise typer.BadParameter(f"{value!r} is not auto, cpu, cuda or cuda:N")
    return value


ModelOption = Annotated[str, typer.Option(
    "--model", metavar="NAME|DIR", rich_help_panel=MODEL,
    help="A name of flowspec models list, a GGUF file, or a directory: a Hugging Face checkpoint, one with target/ "
         "and eagle2/, or a sharded model.")]
AnsweringModelOption = Annotated[str | None, typer.Option(
    "--model", metavar="NAME|DIR", rich_help_panel=MODEL, show_default=False,
    help="As for flowspec generate.  [default: smollm2-135m if it is on this machine, else demo]")]
StagesOption = Annotated[int, typer.Option(
    "--stages", help="Verification devices V1…VN.  [default: 4, or those of a sharded model or of a testbed]",
    show_default=False, callback=_check_stages, metavar="N",
    rich_help_panel=TIME)]  # 0: not given, see ``stages_of``
DtypeOption = Annotated[DtypeChoice, typer.Option(
    "--dtype", hidden=True, rich_help_panel=MODEL, help=(
        "Element type of activations, caches and weights that are not quantised; mixed: fp32, and matrices in 16 "
        "bits, on x86 CPUs; auto: the compute dtype of a sharded model, else fp32; but what answers by the wall "
        "clock takes mixed for a GGUF file."))]
DeviceOption = Annotated[str, typer.Option(
    "--device", callback=torch_device_name, metavar="DEVICE", hidden=True, rich_help_panel=MODEL,
    help="cpu, cuda or cuda:N; auto: a GPU if PyTorch sees one with enough memory for the model.")]
BoardModelOption = Annotated[str | None, typer.Option(
    "--board-model", help="With --cluster: the model's directory on the boards, if it is not the same path "
                          "as here.",
    metavar="DIR", show_default=False, hidden=True, rich_help_panel=MODEL)]
ChatTemplateOption = Annotated[str | None, typer.Option(
    "--chat-template", metavar="NAME|FILE", show_default=False, hidden=True, rich_help_panel=MODEL,
    help="llama-2, vicuna, bare (no format), or a file with a Jinja template.  Default: the "
         "tokenizer's own.")]
TemplateKwargsOption = Annotated[str | None, typer.Option(
    "--chat-template-kwargs", metavar="JSON", show_default=False, hidden=True, rich_help_panel=MODEL,
    help="Variables of the model's chat template; '{\"enable_thinking\": false}' tells Qwen3 not to think.")]
MaxNewTokensOption = Annotated[int, typer.Option(
    "--max-new-tokens", min=1, max=MOST_TOKENS, metavar="N", help="Maximum tokens of an answer.")]
ClockOption = Annotated[Clock, typer.Option(
    "--clock", rich_help_panel=TIME, help="wall: one process per device.  virtual: simulated by a profile.")]
ProfileOption = Annotated[str, typer.Option(
    "--profile", help="The profile that virtual time uses: a name of flowspec profiles, a TOML file, or a "
                      "testbed of boards of one kind or several, such as "
                      "orin-nano-8gb-super:5/qwen3-32b/int4.",
    metavar="NAME|FILE|BOARD:N[,BOARD:N]/MODEL/DTYPE", rich_help_panel=TIME)]
EmulateOption = Annotated[str | None, typer.Option(
    "--emulate", help="Real processes that compute, then wait until this profile's time is over; implies "
                      "--clock wall.",
    metavar="PROFILE", show_default=False, hidden=True, rich_help_panel=TIME)]
StrategyOption = Annotated[str, typer.Option(
    "--strategy", help="A name of flowspec strategies.", metavar="NAME", rich_help_panel=STRATEGY)]
ThreadsOption = Annotated[int, typer.Option(
    "--threads", min=0, max=4096, help="Threads of torch; 0: its default.")]
LogJsonOption = Annotated[bool, typer.Option(
    "--log-json", help="Log lines are JSON objects.", hidden=True, rich_help_panel=OUTPUT)]
FigureOption = Annotated[Path | None, typer.Option(
    "--out", help="Draw a figure, too.", metavar="F.svg|F.png", show_default=False, rich_help_panel=OUTPUT)]
JsonOption = Annotated[Path | None, typer.Option(
    "--json", help="Write the figures here, as JSON.", metavar="OUT", rich_help_panel=OUTPUT)]


def parse_counts(text: str, option: str, between: str = ",") -> list[int]:
    """Read positive whole numbers, separated by ``between``."""
    parts = [part.strip() for part in text.split(between)]
    if not all(part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS and int(part)
               for part in parts):
        separator = "commas" if between == "," else f"an {between}"
        raise UsageError(f"{option} must be whole numbers from 1, separated by {separator}, not {text!r}")
    return [int(part) for part in parts]


_ROWS = 4096  # of text whose caches must fit on a GPU, unless the model takes fewer
# Devices of NVIDIA's drivers in /dev: on a PC, on a Jetson, under WSL.
_DRIVERS = ("nvidia[0-9]*", "nvhost-gpu", "nvgpu", "nvmap", "dxg")
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "mixed": 4}


def device_of(requested: str, model: OpenModel, dtype: Dtype, *, processes: int = 1, rows: int | None = None,
              ) -> str:
    """Return the torch device of D0 and of local stages: "cpu" or "cuda:N".

    processes  share the device
    rows       of text in the caches; None: those of one text

    Raise UsageError for a GPU that is missing or too small; "auto" prints why it rejects a GPU on stderr.
    """
    # Without a driver there is no GPU, and no need to import torch here.
    driver = any(list(Path("/dev").glob(name)) for name in _DRIVERS)
    if requested == "cpu" or (requested == "auto" and not driver):
        return "cpu"
    from flowspec_edge.util.torchdevice import CONTEXT_BYTES, architectures, gpus, pick

    gpu_list: list[TorchGpu] = gpus()
    needed_bytes = processes * CONTEXT_BYTES + loaded_bytes(model, dtype, 1, rows) if gpu_list else 0
    device, reason = pick(requested, gpu_list, architectures(), needed_bytes, model.name)
    if reason:
        print(f"flowspec: note: computing on the CPU: {reason}", file=sys.stderr)
    return device


def plain_device_of(device: str, model: OpenModel, dtype: Dtype, processes: int) -> str:
    """Return the device of plain decoding beside a cluster.

    It is the CPU, with a note, if the weights do not fit twice.
    """
    if device == "cpu":
        return "cpu"
    from flowspec_edge.util.torchdevice import CONTEXT_BYTES, architectures, gpus, pick

    needed_bytes = processes * CONTEXT_BYTES + loaded_bytes(model, dtype, copies=2)
    try:
        return pick(device, gpus(), architectures(), needed_bytes, f"{model.name} and plain decoding beside it")[0]
    except UsageError as error:
        print(f"flowspec: note: plain decoding computes on the CPU: {error}", file=sys.stderr)
        return "cpu"


def loaded_bytes(model: OpenModel, dtype: Dtype, copies: int = 1, rows: int | None = None) -> int:
    """Return the bytes of ``copies`` targets, D0's models, and caches of ``rows`` rows."""
    rows = min(_ROWS, model.max_positions) if rows is None else rows
    if manifest := model.manifest:
        wider = _BYTES[dtype] / _BYTES[manifest.compute_dtype]
        d0 = manifest.parts["draft"]
        stages = [part for name, part in manifest.parts.items() if name != "draft"]
        weight_bytes = copies * sum(part.weight_bytes for part in stages) + d0.weight_bytes
        return int(wider * (weight_bytes + sum(part.cache_bytes(rows) for part in (*stages, d0))))
    from flowspec_edge.boards.planning.model_size import model_bytes

    size = model_bytes(str(model.path), "fp32" if dtype == "mixed" else dtype)
    caches = size.layers * (rows * size.kv_row + size.state) + rows * size.draft_kv_row
    return copies * size.target_weights + size.d0_weights + caches


def require_room(context: int, at_once: int, rows: int, model: OpenModel, dtype: Dtype, local: bool) -> None:
    """Raise UsageError, with the context that fits, if weights and caches exceed this machine's available memory.

    rows   of the caches: ``context`` and the drafts of ``at_once`` requests
    local  whether stages compute in this machine's memory

    Print a note if ``context`` is more than the requests can use, by the model's positions.  Needs no torch.
    """
    limit = model.max_positions
    positions = f"a text of {model.name} has at most {limit} tokens, {at_once} at once use {at_once * limit}"
    available = procfs.sizes(Path("/proc/meminfo")).get("MemAvailable")
    if manifest := model.manifest:
        wider = _BYTES[dtype] / _BYTES[manifest.compute_dtype]
        weights = wider * sum(part.weight_bytes for part in manifest.parts.values())
        row = wider * sum(part.row_bytes for part in manifest.parts.values())
    else:
        weights = model.weight_values * _BYTES[dtype]
        row = cache_values(model.config) * _BYTES[dtype]
    if local and available is not None and weights + rows * row > available:
        fitting = (int((available - weights) / row) - (rows - context)) // 1000 * 1000
        raise UsageError(
            f"--context {context}: caches of {rows * row / 1e9:,.2f} GB and weights of {weights / 1e9:,.2f} "
            f"GB do not fit in the {available / 1e9:,.2f} GB of memory that are available here: "
            + (f"--context {fitting} fits; {positions}" if fitting > 0 else "use --dtype fp16, a model in 4 "
               "bits (flowspec models shard --dtype int4), or end other programs"))
    if context > at_once * limit:
        print(f"flowspec: note: {positions} of --context {context}; the rest keeps texts that ended, for "
              "requests that continue them", file=sys.stderr)


_STAGES = 4


def stages_of(model: OpenModel, requested: int, profile: Profile | None = None) -> int:
    """Return the number of stages that is ``requested``.

    0 is those of a sharded model, of a ``profile`` with a number of boards, or the paper's four.  Raise UsageError if
    they differ.
    """
    testbed = profile.boards - 1 if profile and profile.boards else 0
    stages = _stages_of(model, requested, testbed)
    if profile:
        profile.check_stages(stages)
    return stages


def _stages_of(model: OpenModel, requested: int, testbed: int) -> int:
    manifest = model.manifest
    if manifest is None:
        return requested or testbed or _STAGES
    if requested:
        manifest.check_stages(requested)
    return manifest.stages


_CPUINFO = Path("/proc/cpuinfo")
_CPU_WITH_PRODUCT = " avx2 "  # of float32 rows with matrices in 16 bits


def dtype_of(model: OpenModel, requested: DtypeChoice) -> Dtype:
    """Return the element type that is ``requested``; "auto": the compute dtype of a sharded model, or fp32."""
    if requested != "auto":
        return requested
    return model.manifest.compute_dtype if model.manifest else "fp32"


def answering_dtype(model: OpenModel, requested: DtypeChoice, device: str, clock: Clock = "wall") -> Dtype:
    """Return the element type as :func:`dtype_of`, where someone waits for answers that ``device`` computes.

    A GGUF file's weights were rounded to 4 to 8 bits when it was made, so another rounding to 16 costs nothing beside,
    and CPUs answer twice as fast.  Measurements keep fp32.
    """
    waits = requested == "auto" and clock == "wall" and device == "cpu" and model.from_gguf
    return "mixed" if waits and _CPU_WITH_PRODUCT in procfs.text(_CPUINFO) else dtype_of(model, requested)


def weights_of(model: OpenModel, dtype: Dtype) -> str:
    """Return in which types the weights are (``Manifest.stored``), those of a checkpoint in ``dtype``."""
    return model.manifest.stored if model.manifest else dtype


def template_values(text: str | None) -> dict[str, Any]:
    """Read the value of ``--chat-template-kwargs``.

    Raise UsageError if it is no JSON object, or sets what is not the user's.
    """
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--chat-template-kwargs: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError("--chat-template-kwargs must be a JSON object, such as "
                         '\'{"enable_thinking": false}\'')
    check_values(values)
    return values
