"""SPD's speculation module on disk: config.json and model.safetensors.

Knows the files and is strict about them.  Does not know how the module is run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig

from flowspec_edge.drafting import weights
from flowspec_edge.drafting.spd import SpdModule
from flowspec_edge.errors import FlowspecError

_WHAT = "an SPD module"
_COUNTS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "target_layers", "vocab_size")
_STORED = (
    *_COUNTS, "attention_bias", "head_dim", "hidden_act", "intermediate_size", "max_position_embeddings",
    "mlp_bias", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
)


def load_module(directory: Path, dtype: torch.dtype) -> SpdModule:
    """Read a module.

    Raises UsageError when the directory or a file in it is missing, FlowspecError when a setting or
    a tensor is missing, unexpected, misshapen or unreadable: the text names it.
    """
    raw = weights.read_config(directory, _WHAT)
    for key in _COUNTS:
        if not isinstance(raw.get(key), int):
            raise FlowspecError(f"{directory / 'config.json'} has no {key}: this is not an SPD module's")
    config = LlamaConfig.from_dict({key: raw[key] for key in _STORED if key in raw})
    with torch.device("meta"):  # the shapes only: the weights below take the place of all parameters
        module = SpdModule(config)
    weights.assign(module, weights.read_weights(directory, _WHAT), directory, _WHAT, dtype)
    module.rotary_emb = type(module.rotary_emb)(config)  # its buffers are computed, not stored
    return module.eval()


def save_module(module: SpdModule, directory: Path, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors in ``dtype``."""
    facts = module.config.to_dict()
    config = {key: facts[key] for key in _STORED if key in facts}
    config.update(architectures=["SpdModule"], dtype=str(dtype).removeprefix("torch."))
    weights.write(directory, config, module.state_dict(), dtype)
