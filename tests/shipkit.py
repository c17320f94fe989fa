"""Sharded models without a tensor in them, for tests of how files travel."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

from flowspec_edge.model.manifest import Manifest


def model(directory: Path, stages: int = 2, size: int = 3_000_000, request: str = "a" * 64,
          seed: int = 0) -> Manifest:
    """Parts of a large and a small file each; what is in them follows from ``seed`` and the path."""
    parts = {}
    for part in [*(f"stage-{i + 1}" for i in range(stages)), "draft"]:
        files = []
        for name, count in (("config.json", 700), ("target/model.safetensors", size + len(part))):
            path = directory / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(random.Random(f"{seed} {part}/{name}").randbytes(count))
            files.append({"path": f"{part}/{name}", "size": count,
                          "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
        parts[part] = {"files": files, "parameters": 0, "weight_bytes": 0, "row_bytes": 0}
    (directory / "manifest.json").write_text(json.dumps({
        "format": 1, "source": {"name": "noise", "config_sha256": "0" * 64, "revision": None},
        "model_type": "llama", "layers": stages, "hidden_width": 8, "vocabulary": 8,
        "ranges": [[i, i + 1] for i in range(stages)], "dtype": "fp16", "compute_dtype": "fp16",
        "quantisation": None, "request": request, "parts": parts}))
    return Manifest.read(directory)
