"""What a directory is, if it is no model that stages can run: one line that says so and what to do.

:func:`refuse_unless_runnable` looks at names of files, at config.json and at names of tensors, without torch.
It comes before anything is missed: for a LoRA adapter "config.json is missing" would be true, but no help.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.draft_kinds import kind_of_format, recognise_format
from flowspec_edge.model.families import FAMILIES, MULTIMODAL, family_of
from flowspec_edge.model.weights.located import ADAPTER, MANIFEST, locate, stored_names
from flowspec_edge.util.bounded_read import read_json_object

_CHECKPOINT = "give the directory of the Hugging Face checkpoint (config.json, safetensors, tokenizer)"
_EXPORT = "convert it to Hugging Face's format"
CONVERTED = ("awq", "gptq")  # quantised formats that ``flowspec models shard`` converts
_IN_16_BITS = "take the 16 bit checkpoint, and quantise it with: flowspec models shard --dtype int4"
# Files in which tools beside transformers say how weights are quantised.
_QUANTISED_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq",
                     "hf_quant_config.json": "modelopt"}
_PACKED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")  # ends of names
_FC = re.compile(r"((module|_orig_mod|model|draft_model)\.)*(fusion_)?fc\.weight")  # what makes a head
_WITHOUT_TOKENS = ("Classification", "QuestionAnswering")  # ends of classes' names
_MOST_ENTRIES = 200  # of a directory, to look at


def refuse_unless_runnable(directory: Path, quantised: bool = False) -> None:
    """Raise UsageError if ``directory`` holds something else than a checkpoint that stages can run.

    A checkpoint may still lack files; weights and tokenizer need not be there.  ``quantised`` accepts AWQ and
    GPTQ, which sharding converts.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise UsageError(_without_target(directory) or describe(directory)
                         or f"{directory} is incomplete: config.json is missing")
    config = read_json_object(path)
    problem = next(_other_kinds(directory, config), None)
    if problem is not None:
        raise UsageError(problem)
    require_family(config, path)
    refuse_quantised(config, path, quantised)


def _without_target(directory: Path) -> str | None:
    """Return what is wrong with flowspec's own layout, whose target is missing; None: it is not one."""
    target = directory / "target"
    if target.is_symlink():
        return (f"{target} is a link to {target.readlink()}, which does not exist from there: link the model by its "
                "full path")
    inner = [directory / entry for entry in _entries(directory) if (directory / entry / "config.json").is_file()]
    models = [path for path in inner if not _is_head(path)]
    if len(inner) > len(models) == 1:
        return f"{directory} has a draft head, but no target: rename {models[0]} to {target}"
    return None


def _is_head(directory: Path) -> bool:
    try:
        return head_kind(directory, read_json_object(directory / "config.json")) is not None
    except FlowspecError:
        return False


def describe(directory: Path) -> str | None:
    """Return what a directory without config.json is, in one line with a next step; None: cannot be told."""
    return next(_without_config(directory), None)


def require_family(config: Mapping[str, Any], path: Path | str) -> None:
    """Raise UsageError if stages cannot run models with this ``config``, of ``path``."""
    family, inner, names = config.get("model_type"), config.get("text_config"), config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if str(name).endswith(_WITHOUT_TOKENS):
            raise UsageError(f"{path}: {name} classifies text and gives no tokens: take a checkpoint of a language "
                             "model (…ForCausalLM)")
    if not isinstance(family, str):
        raise UsageError(f"{path} names no model_type: it is not the configuration of a model, or an old "
                         "one; take the checkpoint as it was published")
    if family in FAMILIES or (family in MULTIMODAL and isinstance(inner, dict)):
        return
    only = f"only {', '.join(FAMILIES)}"
    inside = inner.get("model_type") if isinstance(inner, dict) else None
    if inside in FAMILIES:
        raise UsageError(f"{path}: stages cannot run {family!r} models, which hold a language model of the "
                         f"type {inside!r} among other parts.  That can be run alone: take a text checkpoint "
                         "of it, or save its language model as one with transformers")
    if inside or "vision_config" in config or "audio_config" in config:
        raise UsageError(f"{path}: stages cannot run {family!r} models, a language model "
                         f"{f'of the type {inside!r} ' if inside else ''}with parts that see or hear, {only}")
    raise UsageError(f"{path}: stages cannot run {family!r} models, {only}")


def refuse_quantised(config: Mapping[str, Any], path: Path | str, converted: bool = False) -> None:
    """Raise UsageError for weights in a form that cannot be read, or that must be ``converted`` first."""
    home = Path(path).parent
    quantisation = config.get("quantization_config")
    if not quantisation:
        if isinstance(config.get("quantization"), dict):
            raise UsageError(f"{path}: weights quantised for MLX cannot be read; {_IN_16_BITS}")
        for name, method in _QUANTISED_BESIDE.items():
            if (home / name).is_file() and _may_be_quantised(home):
                raise UsageError(_explain_quantised(home / name, method, Path(path)))
        return
    facts = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    method = str(facts.get("quant_method") or "an unknown method").lower()
    if method == family_of(config).packed_as:
        return
    if method not in CONVERTED:
        raise UsageError(f"{path}: weights quantised with {method} cannot be read; {_IN_16_BITS}")
    if not converted:
        raise UsageError(f"{path}: {method.upper()} weights must be converted first: flowspec models shard "
                         f"--model {home} --stages N --out DIR")


def _may_be_quantised(directory: Path) -> bool:
    names = stored_names(directory)
    return not names or any(name.endswith(_PACKED) for name in names)


def _explain_quantised(file: Path, method: str, config: Path) -> str:
    if method in CONVERTED:
        return (f"{file} says that the weights are quantised, but {config.name} has no quantization_config: "
                f'copy its fields there, with "quant_method": "{method}", or {_IN_16_BITS}')
    return f"{file} says that the weights are quantised, which cannot be read; {_IN_16_BITS}"


def _other_kinds(directory: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a directory with a config.json is instead of a model."""
    if (directory / ADAPTER).is_file() and locate(directory) is None:
        yield _adapter(directory)
    if "pretrained_config" in config or "build_config" in config:
        yield f"{directory} is an engine or checkpoint of TensorRT-LLM, which cannot be read: {_CHECKPOINT}"
    if (head := head_kind(directory, config)) is not None:
        yield (f"{directory} is {head}, not a model: give the model that it was trained for, and shard it "
               f"with: flowspec models shard --draft {directory}")
    if locate(directory) is None and "model_type" in config:
        yield from _files_alone(directory)


def head_kind(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Return the kind of draft head in ``directory``, with its article; None if it is none."""
    name = recognise_format(config)
    if name is not None:
        return f"a draft head ({name})" + ("" if kind_of_format(name) else ", of a format that cannot be run")
    names = stored_names(directory)
    if any(".midlayer." in f".{name}" or name.endswith("layers.0.hidden_norm.weight") for name in names):
        return "a draft head (EAGLE-3)"
    if any(_FC.fullmatch(name) for name in names):
        return "a draft head (EAGLE)"
    return None


def _without_config(directory: Path) -> Iterator[str]:
    entries = _entries(directory)
    if not entries:
        yield f"{directory} is an empty directory: {_CHECKPOINT}"
    if (directory / ADAPTER).is_file():
        yield _adapter(directory)
    if (directory / "draft").is_dir() and (directory / MANIFEST).is_file():
        yield f"{directory} is a sharded model without the files of draft/target: copy its part draft again"
    yield from _files_alone(directory)
    yield from _elsewhere(directory, entries)


# Files, by ends of their names, that hold weights which cannot be read: what they are, and what to do.
_OTHER_FILES = (
    ((".nemo",), f"a NeMo checkpoint cannot be read: {_EXPORT}"),
    ((".onnx",), f"an ONNX model cannot be read: {_CHECKPOINT}"),
    ((".npz",), f"an old MLX model cannot be read: {_CHECKPOINT}"),
    ((".engine", ".plan"), f"a TensorRT engine cannot be read: {_CHECKPOINT}"),
    ((".h5", ".msgpack", ".ckpt.index"), f"weights of TensorFlow or Flax cannot be read: {_CHECKPOINT}"),
)
# Entries, by beginnings of their names, that tell a checkpoint of another tool.
_OTHER_ENTRIES = (
    ("latest_checkpointed_iteration.txt", f"a Megatron checkpoint, which cannot be read: {_EXPORT}"),
    ("mp_rank_", f"a Megatron checkpoint, which cannot be read: {_EXPORT}"),
    ("model_weights", f"a NeMo checkpoint, which cannot be read: {_EXPORT}"),
    ("consolidated.", f"a checkpoint in its maker's own format (consolidated.*), which cannot be read: "
                      f"{_CHECKPOINT}"),
    ("model_index.json", f"a pipeline of diffusers, not a language model: {_CHECKPOINT}"),
    ("global_step", "a checkpoint of DeepSpeed's training: make weights of it with its zero_to_fp32.py, and "
                    "give the directory with config.json"),
)


def _files_alone(directory: Path) -> Iterator[str]:
    """Yield what is there instead of weights that can be read."""
    entries = _entries(directory)
    below = [f"onnx/{entry}" for entry in _entries(directory / "onnx")]
    for ends, description in _OTHER_FILES:
        yield from (f"{directory / entry}: {description}" for entry in [*entries, *below] if entry.endswith(ends))
    for begin, description in _OTHER_ENTRIES:
        yield from (f"{directory} is {description}" for entry in entries if entry.startswith(begin))


def _elsewhere(directory: Path, entries: list[str]) -> Iterator[str]:
    """Yield a checkpoint below, as in a cache of the hub's client."""
    candidates = [directory / "snapshots" / entry for entry in _entries(directory / "snapshots")]
    candidates += [directory / entry for entry in entries]
    checkpoints = [str(candidate) for candidate in candidates if (candidate / "config.json").is_file()]
    if checkpoints:
        yield f"{directory} has no config.json; give one of the directories in it: {', '.join(checkpoints[:3])}"


def _adapter(directory: Path) -> str:
    try:
        base = read_json_object(directory / ADAPTER).get("base_model_name_or_path")
    except FlowspecError:
        base = None
    target = f" for {base}" if isinstance(base, str) and base else ""
    return (f"{directory} is an adapter (LoRA){target}, not a model: merge it into its model with peft "
            "(merge_and_unload, then save_pretrained), and give the result")


def refuse_part(directory: Path) -> None:
    """Raise UsageError if ``directory``, which a user gave, is one part of a sharded model."""
    resolved = directory.resolve()
    model_directory = resolved.parent.parent if resolved.parent.name == "draft" else resolved.parent
    if resolved.name.startswith(("stage-", "draft", "target")) and (model_directory / MANIFEST).is_file():
        raise UsageError(f"{directory} is one part of the sharded model {model_directory}: give that directory")


def _entries(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False)
                          if not entry.name.startswith("."))
    except OSError:
        return []
