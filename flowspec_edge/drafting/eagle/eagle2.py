"""The EAGLE-1/2 draft head: one decoder layer that continues the target's features.

Row i pairs feature f_i (the target's post-norm hidden state of token i) with token i + 1, at position i. Its
output approximates f_{i+1}, so lm_head on it ranks the children of token i + 1.  Text rows have true
features; a tree row uses its parent's *output*.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowspec_edge.drafting import checkpoint
from flowspec_edge.drafting.eagle.head_config import llama_layer, published
from flowspec_edge.drafting.eagle.head_drafter import DraftHead, HeadDrafter
from flowspec_edge.drafting.format import HeadFormat, Loaded, Surroundings, require_fit, require_vocabulary
from flowspec_edge.drafting.recorded import RecordedPasses
from flowspec_edge.drafting.tree_cache import CacheMemory
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.config import check_config
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.draft_kind import DraftKind, Shapes
from flowspec_edge.model.families import LLAMA, QWEN2
from flowspec_edge.model.output_head import OutputHead, as_output_head
from flowspec_edge.model.weights.checkpoint import StoredTensor
from flowspec_edge.sampling.rule import DraftVocabulary
from flowspec_edge.stage.families.decoder import Begun, DecoderLayer
from flowspec_edge.stage.families.rotary import Rotation
from flowspec_edge.util.tensors import check_finite
from flowspec_edge.util.weight_file import Embedding, as_embedding, random_embedding

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DecoderConfig):
    """The configuration of an EAGLE-1/2 head: its layer's, and the fields below.

    bias              whether fc has one
    draft_vocab_size  tokens that it drafts; None: all
    """

    bias: bool = True
    draft_vocab_size: int | None = None


class EagleLayer(DecoderLayer):
    """A decoder layer without the norm before the attention."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, 0)
        del self.input_layernorm

    def before(self, rows: Tensor, rotation: Rotation) -> Begun:
        begun: Begun = self.mixer.before(rows, rotation)
        return begun


class EagleHead(DraftHead):
    """fc([embedding of token i + 1; f_i]), one layer, no final norm; its outputs approximate f_{i+1}.

    own_lm_head  [V, H], if the head ranks by another matrix than the target's lm_head; else None
    token_map    int64 [D], the target's ids of the tokens that it can draft; None: all
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.own_lm_head: nn.Linear | None = None
        self.token_map: Tensor | None = None
        self.embed_tokens = random_embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config)])

    @property
    def layer(self) -> EagleLayer:
        return cast(EagleLayer, self.layers[0])

    def forward(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Any, cache: Any) -> Tensor:
        x: Tensor = self.fc(torch.cat((self.embedded(tokens), states), dim=-1))
        out: Tensor = self.layer(x, self.rotation(positions), mask, cache, len(x))
        return out

    def ranking(self, lm_head: OutputHead) -> tuple[nn.Module, DraftVocabulary | None]:
        """Return what ranks a row's children by its output, and the tokens that it ranks.

        ``lm_head``: the target's.
        """
        own_head = self.own_lm_head
        if self.token_map is None:
            return (lm_head if own_head is None else own_head), None
        vocabulary = DraftVocabulary(self.token_map.cpu().numpy(), self.config.vocab_size)
        return (lm_head.restrict_to(self.token_map) if own_head is None else own_head), vocabulary


def rank_outputs(outputs: Tensor, lm_head: nn.Module) -> Tensor:
    """Logits by a head whose outputs are what lm_head reads."""
    return cast(Tensor, lm_head(outputs))


class EagleDrafter(HeadDrafter):
    """A session's drafter with an EAGLE-1/2 head.

    ``logits`` ranks a row's children by its output: the target's lm_head ([V, H], or a module of it), of the head's
    dtype
    and on its device, or a module for the tokens of ``draft_vocabulary``.
    """

    def __init__(self, head: DraftHead, logits: Tensor | nn.Module, memory: CacheMemory | None = None,
                 recorded: RecordedPasses | None = None, draft_vocabulary: DraftVocabulary | None = None
                 ) -> None:
        ranks = as_output_head(logits) if isinstance(logits, Tensor) else logits
        super().__init__(head, ranks, draft_vocabulary, memory, recorded)


_TITLE = "an EAGLE head"


def load_head(directory: Path, embedding: Tensor | Embedding | None, dtype: torch.dtype,
              in_file: bool = False, quantise: Callable[[nn.Module], None] = lambda module: None,
              lm_head: OutputHead | None = None) -> EagleHead:
    """Load an EAGLE-1/2 head.

    embedding  the target's [V, H], which is used if the file has none
    in_file    the file's own rows are read when they are looked up
    quantise   as for ``checkpoint.build``
    lm_head    the target's; a stored one is loaded only if it differs from that

    UsageError for a missing file, FlowspecError that names a missing, unexpected, misshapen or unreadable
    tensor.
    """
    files = checkpoint.HeadFiles(directory)
    return read_head(files, head_config(files), embedding, dtype, in_file, quantise, lm_head)


def read_head(files: checkpoint.HeadFiles, config: EagleConfig, embedding: Tensor | Embedding | None,
              dtype: torch.dtype, in_file: bool, quantise: Callable[[nn.Module], None], lm_head: OutputHead | None
              ) -> EagleHead:
    """Read a head from files whose :func:`head_config` is known, as :func:`load_head`."""
    directory, file_embedding = files.directory, files.own_embedding(config, dtype) if in_file else None
    stored = checkpoint.plain_names(files.read(_TITLE, file_embedding is None), directory)
    matrix, token_map = stored.pop(checkpoint.LM_HEAD, None), stored.pop(_TOKEN_MAP, None)
    shared: Embedding | None = None
    if embedding is not None:
        shared = as_embedding(embedding)
        require_fit(directory, "width", config.hidden_size, shared.embedding_dim)
        require_fit(directory, "vocabulary", config.vocab_size, shared.num_embeddings)
        shared = None if checkpoint.EMBEDDING in stored else shared
    head = checkpoint.build(EagleHead, config, stored, directory, _TITLE, dtype, file_embedding or shared, quantise)
    if token_map is not None:
        head.token_map = token_map.read().long()
        check_target_ids(directory, head.token_map, config.vocab_size, _TOKEN_MAP)
    if matrix is not None and lm_head is not None:
        head.own_lm_head = _load_lm_head(directory, matrix, head, lm_head, dtype)
        if head.own_lm_head is not None:
            quantise(head)
    return head


_TOKEN_MAP = "token_map"  # of vLLM's conversions: the target's ids of a smaller draft vocabulary


def _load_lm_head(directory: Path, stored: StoredTensor, head: EagleHead, lm_head: OutputHead,
                  dtype: torch.dtype) -> nn.Linear | None:
    """Return a stored lm_head, with the rows of the draft vocabulary; None if it is a copy of the target's.

    They are compared by their logits for one state, since the target's may be quantised.
    """
    width, ids = head.config.hidden_size, head.token_map
    rows = [len(ids)] if ids is not None else []
    if list(stored.shape) not in [[count, width] for count in (lm_head.vocabulary, *rows)]:
        raise FlowspecError(f"{directory}: tensor {checkpoint.LM_HEAD} has shape {list(stored.shape)}, and "
                            f"must be [{lm_head.vocabulary}, {width}], as the target's is")
    weight = stored.read()
    if ids is not None and len(weight) != len(ids):
        weight = weight[ids]
    check_finite(weight, dtype, f"{directory}: tensor {checkpoint.LM_HEAD}")
    state = torch.randn(width, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        target_logits = lm_head(state[None].to(lm_head.device, lm_head.dtype))[0].float().cpu()
        target_logits = target_logits if ids is None else target_logits[ids]
        head_logits = (weight.to(dtype).float() @ state.float())
    if (head_logits - target_logits).norm() <= _ALIKE * target_logits.norm():
        return None
    log.warning("%s: tensor %s is not the target's lm_head: the head drafts with its own", directory,
                checkpoint.LM_HEAD)
    linear = nn.Linear(width, len(weight), bias=False, device="meta")
    linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    return linear


_ALIKE = 0.2  # int4 of a matrix changes its logits by about a tenth


def check_target_ids(directory: Path, ids: Tensor, vocabulary: int, name: str = "d2t") -> None:
    """Raise FlowspecError unless the draft tokens' ``ids`` [D] are distinct tokens of the target."""
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < vocabulary:
            raise FlowspecError(f"{directory}: tensor {name} maps a draft token to {extreme}, but the "
                                f"target's vocabulary has {vocabulary} tokens")
    if (distinct := len(ids.unique())) != len(ids):
        raise FlowspecError(f"{directory}: tensor {name} maps {len(ids)} draft tokens to {distinct} "
                            "of the target's")


def save_head(head: EagleHead, directory: Path, dtype: torch.dtype, with_embedding: bool = True) -> None:
    config = head.config
    write_head(head, directory, dtype, with_embedding, architectures=["LlamaForCausalLM"],
               bias=head.fc.bias is not None, qkv_bias=config.family is QWEN2)


def write_head(head: DraftHead, directory: Path, dtype: torch.dtype, with_embedding: bool, **settings: object) -> None:
    """Write a head that is not prepared; config.json has the fields of its layer, and ``settings``."""
    config = {**published(head.config), **settings, "torch_dtype": str(dtype).removeprefix("torch.")}
    stored = {name: weight for name, weight in head.state_dict().items()
              if with_embedding or name != checkpoint.EMBEDDING}
    checkpoint.write(directory, config, stored, dtype)


def head_config(files: checkpoint.HeadFiles) -> EagleConfig:
    """Return the configuration of the head's layer: config.json's, but with the biases that the head's files hold.

    UsageError or FlowspecError if config.json is missing or unusable.
    """
    directory = files.directory
    path = directory / "config.json"
    raw = checkpoint.read_config(directory, _TITLE)
    for key in ("transformer_layer_config", "model"):  # speculators' and vLLM's conversions
        if isinstance(inner := raw.get(key), dict):
            check_config(inner, path)
            raw = {"vocab_size": raw["vocab_size"], **inner} if "vocab_size" in raw else dict(inner)
    names = files.shapes
    checkpoint.refuse_language_model(directory, names, _TITLE)
    if names:
        attention = "layers.0.self_attn."
        raw["bias"] = "fc.bias" in names
        raw["attention_bias"] = f"{attention}o_proj.bias" in names
        raw["qkv_bias"] = f"{attention}q_proj.bias" in names and not raw["attention_bias"]
        raw["mlp_bias"] = "layers.0.mlp.gate_proj.bias" in names
        if _TOKEN_MAP in names:
            raw["draft_vocab_size"] = names[_TOKEN_MAP][0]
    config = eagle_config(raw, path)
    if config.num_hidden_layers != 1:
        raise FlowspecError(f"{path}: an EAGLE-1/2 head has one layer, not {config.num_hidden_layers}")
    return config


def eagle_config(fields: Mapping[str, Any], origin: Path | str) -> EagleConfig:
    """Read a head's configuration from the fields that EAGLE's authors write; fc has a bias if they do not name it.

    The layer is Llama's in heads for other families, too.  FlowspecError for fields that do not go together.
    """
    family = QWEN2 if fields.get("qkv_bias") else LLAMA
    return EagleConfig(**vars(llama_layer(fields, origin, family)), bias=bool(fields.get("bias", True)),
                       draft_vocab_size=fields.get("draft_vocab_size"))


class Eagle2Format(HeadFormat):
    """Reads EAGLE-1 and 2 heads."""

    def load(self, directory: Path, beside: Surroundings) -> Loaded:
        files = checkpoint.HeadFiles(directory)
        config = head_config(files)
        require_fit(directory, "width", config.hidden_size, beside.lm_head.hidden_size)
        require_vocabulary(directory, config.vocab_size, beside.lm_head)
        head = read_head(files, config, beside.embedding, beside.dtype, True, beside.quantise, beside.lm_head)
        uses_whole_lm_head = head.own_lm_head is None and head.token_map is None
        ranks, drafted = beside.placed(head).ranking(beside.lm_head)
        narrow = beside.narrowed(head, rank_outputs) if uses_whole_lm_head else None
        return Loaded(partial(EagleDrafter, head, narrow or ranks, draft_vocabulary=drafted), config.vocab_size)

    def config(self, directory: Path) -> Any:
        return head_config(checkpoint.HeadFiles(directory))

    def widths(self, directory: Path, config: Any, shapes: Shapes, layers: int) -> list[int]:
        fc = shapes.get("fc.weight")
        return [config.hidden_size, *([fc[0]] if fc else [])]

    def unread(self) -> frozenset[str]:
        return frozenset({checkpoint.LM_HEAD})  # a head ranks by the target's; converters store a copy

    def on_meta(self, directory: Path) -> nn.Module:
        return checkpoint.on_meta(EagleHead, self.config(directory))

    def usual(self, target: DecoderConfig, kind: DraftKind) -> nn.Module:
        return checkpoint.on_meta(EagleHead, EagleConfig(**vars(usual_layer(target))))


def usual_layer(target: DecoderConfig) -> DecoderConfig:
    """Return a head's layer in the shape of a target's layers."""
    return llama_layer({
        "vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "num_hidden_layers": 1,
        "intermediate_size": target.intermediate_size or 4 * target.hidden_size, **layer_heads(target),
        "head_dim": target.head_dim}, target.origin)


def layer_heads(target: Any) -> dict[str, int]:
    """Return the numbers of attention heads of a head's layer.

    They are the target's, unless these do not divide the layer's width, which other programs' Llamas forbid.
    ``target``: its configuration, here or of transformers.
    """
    heads = target.num_attention_heads
    if target.hidden_size % heads:
        heads = target.hidden_size // target.head_dim
    return {"num_attention_heads": heads, "num_key_value_heads": gcd(heads, target.num_key_value_heads or heads)}


FORMAT = Eagle2Format()
