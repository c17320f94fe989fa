"""What Ollama's clients ask about the server and its model."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from typing import Any

from flowspec_edge import __version__
from flowspec_edge.serving.openai.prepare import ServedModel

# That of the API which the door follows: clients compare it. Thinking came with 0.9, its levels with 0.11.
_API_VERSION = "0.12.0"


class ModelCard:
    """The one model, as Ollama's clients see models. Its size is not told: D0 may have a part of it only."""

    def __init__(self, served_model: ServedModel) -> None:
        config = served_model.model.target / "config.json"
        modified = datetime.fromtimestamp(config.stat().st_mtime, timezone.utc)
        self._served = served_model
        self._family = str(served_model.model.config.get("model_type", ""))
        self._entry = {"name": served_model.name, "model": served_model.name,
                       "modified_at": modified.isoformat().replace("+00:00", "Z"),
                       "digest": hashlib.sha256(config.read_bytes()).hexdigest(),
                       "details": {"parent_model": "", "format": "safetensors", "family": self._family,
                                   "families": [self._family], "parameter_size": "",
                                   "quantization_level": ""}}

    def version(self) -> dict[str, Any]:
        """GET /api/version."""
        return {"version": _API_VERSION, "flowspec": __version__}

    def tags(self) -> dict[str, Any]:
        """GET /api/tags."""
        return {"models": [self._entry]}

    def running(self) -> dict[str, Any]:
        """GET /api/ps: the model stays loaded."""
        return {"models": [self._entry | {"context_length": self._served.context_tokens}]}

    def show(self) -> dict[str, Any]:
        """POST /api/show."""
        tokenizer, model = self._served.tokenizer, self._served.model
        able = {"completion": True, "tools": tokenizer.tool_format is not None,
                "thinking": tokenizer.reasoning_format is not None}
        about = {"general.architecture": self._family, "general.basename": self._served.name,
                 f"{self._family}.context_length": self._served.context_tokens,
                 f"{self._family}.embedding_length": model.hidden_width,
                 f"{self._family}.vocab_size": int(model.config["vocab_size"])}
        return {"modelfile": "", "parameters": "", "template": "", "modified_at": self._entry["modified_at"],
                "details": self._entry["details"], "model_info": about,
                "capabilities": [name for name, has in able.items() if has]}
