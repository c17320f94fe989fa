"""Sharded models for tests: cutting in one call, and checkpoints in the formats of the hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flowspec_edge.model.manifest import Manifest
from flowspec_edge.sharding.job import run
from flowspec_edge.sharding.plan import make_plan, ranges_for, recipe_for
from flowspec_edge.sharding.source import open_source


def cut(model: Path, out: Path, stages: int = 2, dtype: str | None = None, split: Sequence[int] | None = None,
        drafts: Sequence[Path] = (), **options: Any) -> Manifest:
    """``flowspec models shard`` without the command line."""
    source = open_source(str(model), drafts)
    recipe = recipe_for(source, dtype, **options)  # type: ignore[arg-type]
    return run(make_plan(source, recipe, ranges_for(source.layers, None if split else stages, split)), out)


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor below a directory, by the real library."""
    return {name: tensor for path in sorted(directory.rglob("*.safetensors"))
            for name, tensor in load_file(path).items()}


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of model.safetensors, or drop them (None); "__" stands for "."."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def as_bin(directory: Path, files: int = 1, **options: Any) -> None:
    """Turn model.safetensors into PyTorch's files, as older releases of transformers wrote them."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    if files == 1:
        torch.save(tensors, directory / "pytorch_model.bin", **options)
        return
    weight_map = {name: f"pytorch_model-{i % files + 1:05d}-of-{files:05d}.bin"
                  for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name, at in weight_map.items() if at == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
