"""Sharded models for tests: cutting in one call, and checkpoints in the formats of the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from flowspec_edge.model.manifest import Manifest
from flowspec_edge.sharding.job import run
from flowspec_edge.sharding.plan import make_plan, ranges_for, recipe_for
from flowspec_edge.sharding.source import open_source

_MATRIX = re.compile(r"\.layers\..*(_proj|\.w[123])\.weight$")  # what AWQ and GPTQ quantise


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


def words(numbers: NDArray[np.int64]) -> torch.Tensor:
    """Pack numbers 0..15, eight neighbours of a row into an int32, lowest bits first."""
    packed = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
    for place in range(8):
        packed |= numbers[:, place::8].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(packed.view(np.int32))


def awq_words(numbers: NDArray[np.int64]) -> torch.Tensor:
    """The same in AWQ's order of eight neighbours."""
    eights = numbers.reshape(len(numbers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
    return words(eights.reshape(numbers.shape))


def quantised(model: Path, method: str, order: NDArray[np.int64] | None = None) -> dict[str, torch.Tensor]:
    """Turn a checkpoint into GPTQ's or AWQ's format with random matrices, in place; returns what these stand
    for.  Routers stay in 16 bits, as published checkpoints have them.

    A bias of zeros beside one matrix, as some tools write it.
    """
    random = np.random.default_rng(0)
    tensors = load_file(model / "model.safetensors")
    meant = {}
    for name in [n for n in tensors if _MATRIX.search(n)]:
        prefix, (rows, columns) = name.removesuffix(".weight"), tensors.pop(name).shape
        codes, zeros = random.integers(0, 16, (rows, columns)), random.integers(0, 16, (rows, columns // 64))
        scales = torch.from_numpy(2.0 ** random.integers(-9, -5, zeros.shape)).half()
        steps = scales.double().numpy().repeat(64, 1)
        meant[name] = torch.from_numpy((codes - zeros.repeat(64, 1)) * steps).float()
        groups = torch.arange(columns, dtype=torch.int32) // 64
        tensors[f"{prefix}.scales"] = scales.t().contiguous()
        if method == "awq":
            tensors.update({f"{prefix}.qweight": awq_words(codes.T), f"{prefix}.qzeros": awq_words(zeros.T)})
            continue
        tensors.update({
            f"{prefix}.qweight": words(codes).t().contiguous(),
            f"{prefix}.qzeros": words((zeros.T - 1) % 16).contiguous(),
            f"{prefix}.g_idx": groups if order is None else groups.flip(0)})
    first = next(name for name in meant if "attn" not in name)
    tensors[f"{first.removesuffix('.weight')}.bias"] = torch.zeros(len(meant[first]))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 64} | (
        {"desc_act": False} if method == "gptq" else {"version": "gemm", "zero_point": True})
    (model / "config.json").write_text(json.dumps(config))
    return meant
