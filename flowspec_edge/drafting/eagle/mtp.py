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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowspec_edge.drafting import checkpoint
from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter, rank_outputs
from flowspec_edge.drafting.eagle.head_drafter import DraftHead
from flowspec_edge.drafting.format import Loaded, OwnLayerFormat, Surroundings, require_fit
from flowspec_edge.model.config import check_config
from flowspec_edge.model.decoder_config import DecoderConfig, decoder_config
from flowspec_edge.model.draft_kind import DraftKind, Shapes
from flowspec_edge.model.families import text_config
from flowspec_edge.stage.families.decoder import DecoderLayer
from flowspec_edge.stage.families.norm import Norm
from flowspec_edge.util.bounded_read import read_json_object
from flowspec_edge.util.weight_file import MTP, Embedding, as_embedding, random_embedding

_TITLE = "an MTP layer"


class MtpHead(DraftHead):
    """A layer that a target brings for drafting its next tokens (MTP).

    ``config``: the target's, of one layer with attention (:func:`mtp_shape`).
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            Norm(width, config.rms_norm_eps, config.family.form.centred_norms) for _ in range(3))
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, 0)])
        self.embed_tokens = random_embedding(config.vocab_size, width)

    @property
    def layer(self) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[0])

    def forward(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Any, cache: Any) -> Tensor:
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(self.embedded(tokens)), self.pre_fc_norm_hidden(states)), -1))
        return cast(Tensor, self.norm(self.layer(x, self.rotation(positions), mask, cache, len(x))))


def mtp_config(directory: Path) -> DecoderConfig:
    """Read the layer's configuration from a target's config.json; UsageError for fields that do not go together."""
    path = directory / "config.json"
    fields = text_config(read_json_object(path))
    check_config(fields, path)
    return mtp_shape(decoder_config(fields, path))


def mtp_shape(target: DecoderConfig) -> DecoderConfig:
    """Return the configuration of a target's MTP layer."""
    return replace(target, num_hidden_layers=1, layer_types=("full_attention",), sparse=target.sparse[:1])


def mtp_tensors(config: DecoderConfig) -> Mapping[str, torch.Size]:
    """Shapes of the tensors of an MTP layer of :func:`mtp_config`, by their names in checkpoints."""
    head = checkpoint.on_meta(MtpHead, config)
    return {f"{MTP}{name}": value.shape for name, value in head.state_dict().items()
            if name != checkpoint.EMBEDDING}


def load_mtp(directory: Path, embedding: Tensor | Embedding, dtype: torch.dtype,
             quantise: Callable[[nn.Module], None] = lambda module: None) -> MtpHead:
    """Load the tensors ``mtp.*`` in ``directory``: a target's checkpoint, or what sharding makes of it.

    ``embedding`` [V, H]: the target's.  Errors as for ``load_head``.
    """
    config, shared = mtp_config(directory), as_embedding(embedding)
    require_fit(directory, "width", config.hidden_size, shared.embedding_dim)
    stored = {name.removeprefix(MTP): tensor
              for name, tensor in checkpoint.read_weights(directory, _TITLE).items() if name.startswith(MTP)}
    return checkpoint.build(MtpHead, config, stored, directory, _TITLE, dtype, shared, quantise)


class MtpFormat(OwnLayerFormat):
    """Reads the MTP layer in a target's checkpoint, or in what sharding makes of it."""

    def load(self, directory: Path, beside: Surroundings) -> Loaded:
        assert beside.embedding is not None
        head = load_mtp(directory, beside.embedding, beside.dtype, beside.quantise)
        ranks = beside.narrowed(beside.placed(head), rank_outputs)
        return Loaded(partial(EagleDrafter, head, ranks), head.config.vocab_size)

    def config(self, directory: Path) -> Any:
        return mtp_config(directory)

    def tensors(self, config: Any) -> Shapes:
        return mtp_tensors(config)

    def on_meta(self, directory: Path) -> nn.Module:
        return checkpoint.on_meta(MtpHead, mtp_config(directory))

    def usual(self, target: DecoderConfig, kind: DraftKind) -> nn.Module:
        return checkpoint.on_meta(MtpHead, mtp_shape(target))


FORMAT = MtpFormat()
