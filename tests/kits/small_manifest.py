"""A manifest of one stage, for tests of what a deployment decides: its files are nowhere."""

from __future__ import annotations

from flowspec_edge.model.manifest import DRAFT, Manifest

REQUEST = "a" * 64
MANIFEST = Manifest.model_validate({
    "format": 1, "source": {"name": "demo", "config_sha256": "0" * 64}, "model_type": "llama", "layers": 2,
    "hidden_width": 8, "vocabulary": 9, "ranges": ((0, 2),), "dtype": "fp16", "compute_dtype": "fp16",
    "quantisation": None, "request": REQUEST,
    "parts": {part: {"files": (), "parameters": 1, "weight_bytes": 1, "row_bytes": 1}
              for part in ("stage-1", DRAFT)}})
