"""The directory of a model that a GGUF file holds: config.json, the tokenizer and a table of its tensors.

It is made when the file is first given, below the user's cache, and found again by the file's place, size and time.
The weights stay in the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.draft_kinds import stored_kinds
from flowspec_edge.model.gguf.config import ROPE_FACTORS, Fields, config_of
from flowspec_edge.model.gguf.files import model_name, parts_of
from flowspec_edge.model.gguf.header import GgufHeader, GgufTensor, read_header
from flowspec_edge.model.gguf.names import tensor_locations
from flowspec_edge.model.weights.gguf_types import can_be_read
from flowspec_edge.model.weights.located import GGUF_TABLE

_VERSION = 2  # of what is written; another one is written anew
_OWN_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # beside the file: taken instead
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def home_of(file: Path, name: str | None = None) -> Path:
    """Return the model's directory, which is made unless it is there; its own name is the model's.

    ``name``: by default the file's, without its suffix.

    Draft models beside the file, such as ``eagle2/``, are linked into it; so are a tokenizer.json and a chat template,
    which are taken instead of the file's own.  UsageError for what stages cannot run; FlowspecError for a damaged file,
    a missing part of a split one, and a cache that cannot be written.
    """
    parts = parts_of(Path(os.path.abspath(file)))  # links stay: the hub's cache has files named by their hashes
    beside = _beside(parts[0])
    facts = [_VERSION, [_state(part) for part in parts], [[str(path), path.stat().st_mtime_ns] for path in beside]]
    name = name or model_name(parts[0])
    home = _cache() / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16] / name
    if (home / GGUF_TABLE).is_file():
        return home
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=home.parent))
    except OSError as error:
        raise FlowspecError(f"cannot write {home.parent}: {error.strerror}: make room there, or set XDG_CACHE_HOME"
                            ) from error
    try:
        _write(parts, beside, building)
        building.chmod(0o755)
        os.replace(building, home)
    except OSError as error:
        if not (home / GGUF_TABLE).is_file():  # else another process made it meanwhile
            raise FlowspecError(f"cannot write {home}: {error.strerror}: make room there, or set XDG_CACHE_HOME"
                                ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return home


def _write(parts: Sequence[Path], beside: Sequence[Path], directory: Path) -> None:
    headers = [read_header(part) for part in parts]
    fields = Fields(parts[0], headers[0].fields)
    tensors = [tensor for header in headers for tensor in header.tensors]
    embedding = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise FlowspecError(f"{parts[0]} has no tensor token_embd.weight: it is no language model")
    config = config_of(fields, {tensor.name for tensor in tensors}, embedding.shape[0], _rope_factors(headers))
    _write_json(directory / "config.json", config)
    ends = [number for key in _ENDS if (number := fields.get(f"tokenizer.ggml.{key}")) is not None]
    _write_json(directory / "generation_config.json", {"eos_token_id": list(dict.fromkeys(ends))} if ends else {})
    for path in beside:
        (directory / path.name).symlink_to(path)
    if not (directory / "tokenizer.json").exists():
        from flowspec_edge.model.gguf.tokenizer import write_tokenizer  # the library takes a while

        write_tokenizer(fields, directory)
    _write_json(directory / GGUF_TABLE, _table(headers, config))


def _table(headers: Sequence[GgufHeader], config: dict[str, Any]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for number, header in enumerate(headers):
        stored = [tensor for tensor in header.tensors if tensor.name != ROPE_FACTORS]
        for tensor in stored:
            _check(header.path, tensor)
        tensors |= {location.name: {"file": number, "at": location.at, "type": location.type, "shape": location.shape,
                                    "heads": location.heads, "offset": location.offset}
                    for location in tensor_locations(stored, config)}
    types = {tensor.type.name: [tensor.type.values, tensor.type.size] for header in headers
             for tensor in header.tensors}
    return {"files": [_state(header.path) for header in headers], "types": types, "tensors": tensors}


def _check(path: Path, tensor: GgufTensor) -> None:
    if len(tensor.shape) == 1 and tensor.type.values > 1:
        raise FlowspecError(f"{path}: tensor {tensor.name}, a vector, is stored in blocks ({tensor.type.name}), which "
                            "no converter does: copy the file again")
    if not can_be_read(tensor.type):
        raise UsageError(f"{path}: tensor {tensor.name} is stored as {tensor.type.name}, which the package gguf cannot "
                         "dequantise: take a file of another type, such as Q4_K_M or Q8_0")


def _rope_factors(headers: Sequence[GgufHeader]) -> Any:
    for header in headers:
        for tensor in header.tensors:
            if tensor.name == ROPE_FACTORS:
                if tensor.type.name != "F32":
                    raise UsageError(f"{header.path}: tensor {tensor.name} is stored as {tensor.type.name}, not F32")
                with header.path.open("rb") as file:
                    file.seek(tensor.at)
                    return np.frombuffer(file.read(tensor.nbytes), "<f4")
    return None


def _beside(file: Path) -> list[Path]:
    """Return what a user put beside the file: draft models, and a tokenizer of its own."""
    drafts = [file.parent / kind.directory for kind in stored_kinds() if kind.directory]
    drafts = [path for path in drafts if (path / "config.json").is_file()]
    tokenizer_files = [path for name in _OWN_TOKENIZER if (path := file.parent / name).is_file()]
    return drafts + (tokenizer_files if (file.parent / "tokenizer.json") in tokenizer_files else [])


def _state(path: Path) -> dict[str, Any]:
    now = path.stat()
    return {"path": str(path), "size": now.st_size, "mtime_ns": now.st_mtime_ns}


def _cache() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "flowspec" / "gguf"


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


