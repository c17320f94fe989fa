"""A model's own MTP layer as a draft head: Qwen3-Next, and the language models of Qwen3.5 and 3.6.

Row i pairs f_i, the target's state of token i *after* its final norm, with token i + 1, at position i, as in
EAGLE-2: fc joins both, each normed; one layer with full attention, dense or sparse like the target's; a norm.
The target's lm_head on the normed output ranks the children of token i + 1, and a tree row uses its parent's
normed output.  Embeddings and lm_head are the target's.

Source: vLLM's ``qwen3_next_mtp.py`` and ``qwen3_5_mtp.py``, whose models return normed states; SGLang's
``qwen3_next_mtp.py`` computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from flowspec_edge.drafting import checkpoint
from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter, rank_outputs
from flowspec_edge.drafting.eagle.head_drafter import ATTENTION, FusibleHead, KeyValueCache
from flowspec_edge.drafting.format import Loaded, OwnLayerFormat, Surroundings, require_fit
from flowspec_edge.drafting.fused import DraftLayer
from flowspec_edge.errors import FlowspecError, last_line
from flowspec_edge.model.config import check_config
from flowspec_edge.model.draft_kind import DraftKind, Shapes
from flowspec_edge.model.experts import separate_experts
from flowspec_edge.model.families import text_config
from flowspec_edge.util.bounded_read import read_json_object
from flowspec_edge.util.kernels import angles
from flowspec_edge.util.weight_file import MTP, Embedding, as_embedding

_WHAT = "an MTP layer"


class MtpHead(FusibleHead):
    """``config``: the target's, of one layer with attention (:func:`mtp_config`); the layer (its experts one
    by one), the norms and the rotary embedding are those that transformers has for the family."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        core = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).model
        separate_experts(core)
        self.config = config
        width, eps, norm = config.hidden_size, config.rms_norm_eps, type(core.norm)
        self.pre_fc_norm_embedding = norm(width, eps=eps)
        self.pre_fc_norm_hidden = norm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = core.layers
        self.norm = core.norm
        self.embed_tokens = core.embed_tokens
        self.rotary_emb = core.rotary_emb

    def forward(self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor,
                cache: KeyValueCache) -> Tensor:
        """As :meth:`EagleHead.forward`."""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(self.embedded(tokens)),
                               self.pre_fc_norm_hidden(features)), dim=-1))
        x = self.layers[0](x, position_embeddings=angles(self.rotary_emb, x, positions),
                           attention_mask=mask, past_key_values=cache)
        return cast(Tensor, self.norm(x))

    def _fused_layer(self) -> DraftLayer | None:
        return None  # its attention has output gates


def mtp_config(directory: Path) -> Any:
    """Of a target's config.json. FlowspecError or UsageError for fields that do not go together."""
    path = directory / "config.json"
    fields = text_config(read_json_object(path))
    check_config(fields, path)
    try:
        config = AutoConfig.for_model(**fields)
    except Exception as error:  # transformers and huggingface_hub raise many kinds of errors
        raise FlowspecError(f"{path}: {last_line(error)}") from error
    return mtp_shape(config)


def mtp_shape(target: Any) -> Any:
    """The configuration of an MTP layer for a target of transformers' configuration ``target``."""
    config = deepcopy(target)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    return config


def mtp_tensors(config: Any) -> Mapping[str, torch.Size]:
    """Shapes of the tensors of an MTP layer of :func:`mtp_config`, by their names in checkpoints."""
    head = checkpoint.on_meta(MtpHead, config)
    return {f"{MTP}{name}": value.shape for name, value in head.state_dict().items()
            if name != checkpoint.EMBEDDING}


def load_mtp(directory: Path, embedding: Tensor | Embedding, dtype: torch.dtype,
             quantise: Callable[[nn.Module], None] = lambda module: None) -> MtpHead:
    """Of the tensors ``mtp.*`` in ``directory``: a target's checkpoint, or what sharding makes of it.

    ``embedding`` [V, H]: the target's.  Errors as for ``load_head``.
    """
    config, shared = mtp_config(directory), as_embedding(embedding)
    require_fit(directory, "width", config.hidden_size, shared.embedding_dim)
    stored = {name.removeprefix(MTP): tensor
              for name, tensor in checkpoint.read_weights(directory, _WHAT).items() if name.startswith(MTP)}
    return checkpoint.build(MtpHead, config, stored, directory, _WHAT, dtype, shared, quantise)


class MtpFormat(OwnLayerFormat):
    """Reads the MTP layer in a target's checkpoint, or in what sharding makes of it."""

    def load(self, directory: Path, beside: Surroundings) -> Loaded:
        assert beside.embedding is not None
        head = load_mtp(directory, beside.embedding, beside.dtype, beside.quantise)
        ranks = beside.narrowed(head, rank_outputs)
        return Loaded(partial(EagleDrafter, beside.placed(head), ranks), head.config.vocab_size)

    def config(self, directory: Path) -> Any:
        return mtp_config(directory)

    def tensors(self, config: Any) -> Shapes:
        return mtp_tensors(config)

    def on_meta(self, directory: Path) -> nn.Module:
        return checkpoint.on_meta(MtpHead, mtp_config(directory))

    def usual(self, target: Any, kind: DraftKind) -> nn.Module:
        return checkpoint.on_meta(MtpHead, mtp_shape(target))


FORMAT = MtpFormat()
