"""The EAGLE-3 draft head: one decoder layer that continues three of the target's inner states.

Row i pairs h_i, fused from three inner states of token i, with token i + 1, at position i.  Its output
approximates h_{i+1}; the head's own norm and lm_head rank the children of token i + 1, over a draft
vocabulary that may be a part of the target's.  A tree row uses its parent's *output*, before the norm.

Stages send the states to D0 in Tap messages: three times 2 bytes a value, each over one link, off the
segment's path.  fc is linear, so stages could instead add to an accumulator in the segment, but sums need
float32: 4 bytes a value on up to N hops of the critical path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from flowspec_edge.drafting import checkpoint
from flowspec_edge.drafting.checkpoint import EMBEDDING, StoredTensor
from flowspec_edge.drafting.eagle.eagle2 import PUBLISHED, require_fit, write_head
from flowspec_edge.drafting.eagle.head_drafter import (
    ATTENTION,
    FusibleHead,
    HeadDrafter,
    KeyValueCache,
    register_attention,
)
from flowspec_edge.drafting.fused import DraftLayer
from flowspec_edge.drafting.recorded import RecordedPasses
from flowspec_edge.drafting.tree_cache import CacheMemory
from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.messages import Tap
from flowspec_edge.sampling.rule import DraftVocabulary, Rank, Sampling
from flowspec_edge.util.kernels import RmsNorm
from flowspec_edge.util.tensors import to_device, to_torch
from flowspec_edge.util.weight_file import Embedding, as_embedding

CAPTURED = 3  # inner states of the target per row


def captured_layers(layers: int) -> tuple[int, ...]:
    """Depths of EAGLE-3's states: the inputs of layers 2, n // 2 and n - 3, rising, within the model."""
    first, last = min(1, layers - 1), layers - 1
    return tuple(sorted(min(max(layer, first), last) for layer in (2, layers // 2, layers - 3)))


class Eagle3Layer(nn.Module):
    """A Llama decoder layer whose attention reads [embedding; hidden], each with its own norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.self_attn: nn.Module = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(self.self_attn, name)
            setattr(self.self_attn, name,
                    nn.Linear(2 * width, plain.out_features, bias=plain.bias is not None))
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)


class Eagle3Head(FusibleHead):
    """fc over the captured states, one layer, a norm and an lm_head of its own.

    ``config`` is a LlamaConfig plus ``target_hidden_size`` and ``draft_vocab_size``; ``vocab_size`` is the
    target's.  A smaller draft vocabulary adds the buffers ``d2t`` (int64 [draft_vocab]: target id minus draft
    id) and ``t2d`` (bool [vocab]: is a draft token).
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        register_attention()
        config._attn_implementation = ATTENTION
        width, vocabulary, draft_tokens = config.hidden_size, config.vocab_size, config.draft_vocab_size
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.fc = nn.Linear(CAPTURED * config.target_hidden_size, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, draft_tokens, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if draft_tokens != vocabulary:
            self.register_buffer("d2t", torch.zeros(draft_tokens, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(vocabulary) < draft_tokens)

    def fuse(self, states: Tensor) -> Tensor:
        """States [..., 3 * target_H] to h [..., H]; width H passes unchanged (the published convention)."""
        if states.shape[-1] == self.config.hidden_size:
            return states
        fused: Tensor = self.fc(states)
        return fused

    def forward(self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor,
                cache: KeyValueCache) -> Tensor:
        """As :meth:`EagleHead.forward`, with h_i for f_i: fused, or the output of the row before it."""
        layer = self.midlayer
        if self.fused is not None:
            rows, embedded = hidden[0], self.embedded(tokens)[0]
            x = torch.cat((self._input_norm(embedded), self._hidden_norm(rows)), -1)
            rotary = self.rotary_emb(x, position_ids=positions)
            return cast(Tensor, self.fused(x, rows, rotary, mask, cache)[None])
        x = torch.cat((layer.input_layernorm(self.embedded(tokens)), layer.hidden_norm(hidden)), dim=-1)
        attended, _ = layer.self_attn(
            x, position_embeddings=self.rotary_emb(x, position_ids=positions),
            attention_mask=mask, past_key_values=cache,
        )
        x = hidden + attended
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out

    def _fused_layer(self) -> DraftLayer:
        layer = self.midlayer
        self._input_norm, self._hidden_norm, self._output_norm = map(
            RmsNorm.of, (layer.input_layernorm, layer.hidden_norm, self.norm))
        return DraftLayer(layer.self_attn, layer.mlp, layer.post_attention_layernorm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Row outputs [..., H] to [..., draft_vocab]."""
        normed = self.norm(hidden) if self.fused is None else self._output_norm(hidden)
        return cast(Tensor, self.lm_head(normed))

    def target_ids(self) -> Tensor:
        """The target's id of each draft token: int64 [draft_vocab]."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.norm.weight.device)
        return ids + self.d2t if "d2t" in self._buffers else ids


class Eagle3Drafter(HeadDrafter):
    """``layers``: after how many target layers the states are captured, in ``fc``'s order; they may
    repeat."""

    def __init__(self, head: Eagle3Head, layers: Sequence[int], memory: CacheMemory | None = None,
                 recorded: RecordedPasses | None = None) -> None:
        self._layers = tuple(layers)
        self.taps = tuple(sorted(set(layers)))
        self._tapped: dict[int, dict[int, Tensor]] = {}  # number -> layer -> state [target_H]
        vocabulary = None
        if head.config.draft_vocab_size != head.config.vocab_size:
            vocabulary = DraftVocabulary(head.target_ids().cpu().numpy(), head.config.vocab_size)
        self._fuse = head.fuse
        super().__init__(head, head.logits, vocabulary, memory, recorded)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        super().reset(sampling, rank, tau)
        self._tapped.clear()

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        self._tapped.clear()  # the numbers are another session's
        return super().rewind(tokens, sampling, rank, tau)

    def tap(self, message: Tap) -> None:
        if message.layer in self.taps:
            states = to_device(to_torch(message.hidden), self._device).to(self._dtype)
            for number, state in zip(message.numbers.tolist(), states, strict=True):
                self._tapped.setdefault(number, {})[message.layer] = state

    def _text_states(self, features: Tensor, rows: Sequence[int]) -> Tensor:
        states = torch.stack([torch.cat([self._state(row, layer) for layer in self._layers]) for row in rows])
        # Older rows cannot predict a token any more.
        self._tapped = {n: by_layer for n, by_layer in self._tapped.items() if n >= rows[-1]}
        return states

    def _state(self, row: int, layer: int) -> Tensor:
        state = self._tapped.get(row, {}).get(layer)
        if state is None:
            raise ProtocolError(f"the state of row {row} after {layer} layers is missing: a token that it "
                                "predicted was committed before its taps came")
        return state

    def _to_head_input(self, states: Tensor) -> Tensor:
        return self._fuse(states)


_WHAT = "an EAGLE-3 head"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OWN = ("draft_vocab_size", "target_hidden_size", _LAYER_IDS, "eagle_config")
# Switches of heads with other arithmetic, which other tools publish under the same architecture.
_OTHERS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def load_head3(directory: Path, embedding: Tensor | Embedding | None, dtype: torch.dtype,
               in_file: bool = False, quantise: Callable[[nn.Module], None] = lambda module: None
               ) -> Eagle3Head:
    """As ``load_head``; also FlowspecError, with both numbers, if the head does not fit the target."""
    config = head3_config(directory)
    own = checkpoint.own_embedding(directory, config, dtype) if in_file else None
    stored = checkpoint.plain_names(checkpoint.read_weights(directory, _WHAT, own is None), directory)
    shared: Embedding | None = None
    if embedding is not None:
        shared = as_embedding(embedding)
        require_fit(directory, "vocabulary", config.vocab_size, shared.num_embeddings)
        width = shared.embedding_dim
        if config.target_hidden_size != width:
            raise FlowspecError(
                f"{directory}: the head takes states of width {config.target_hidden_size}, the target's have "
                f"{width}; a head works with the target that it was trained for only"
            )
        if own is not None or EMBEDDING in stored:
            shared = None
        elif width != config.hidden_size:
            raise FlowspecError(f"{directory}: the head's width is {config.hidden_size}, the target's "
                                f"{width}, and it brings no {EMBEDDING} of its own")
    _check_fc(directory, stored, config)
    _drop_identity(stored, config)
    head = checkpoint.build(Eagle3Head, config, stored, directory, _WHAT, dtype, own or shared, quantise)
    _check_draft_vocabulary(directory, head)
    return head


def save_head3(head: Eagle3Head, directory: Path, dtype: torch.dtype, with_embedding: bool = False) -> None:
    """The embedding is usually the target's."""
    write_head(head, directory, dtype, with_embedding, (*PUBLISHED, *_OWN),
               architectures=["LlamaForCausalLMEagle3"])


def head3_config(directory: Path) -> LlamaConfig:
    """UsageError or FlowspecError if config.json is missing or unusable."""
    path = directory / "config.json"
    raw = checkpoint.read_config(directory, _WHAT)
    if "transformer_layer_config" in raw:
        raise FlowspecError(f"{path} is in the format of the speculators library; "
                            "only heads as EAGLE's authors publish them can be read")
    for switch in _OTHERS:
        if raw.get(switch):
            raise FlowspecError(f"{path}: heads with {switch} are not supported")
    raw.pop("model_type", None)  # the layer is Llama's in every family
    config = checkpoint.llama_config(raw, directory)
    if config.num_hidden_layers != 1:
        raise FlowspecError(f"{path}: an EAGLE-3 head has one layer, not {config.num_hidden_layers}")
    for key, usual in (("target_hidden_size", config.hidden_size), ("draft_vocab_size", config.vocab_size)):
        if getattr(config, key, None) is None:
            setattr(config, key, usual)
    if config.draft_vocab_size > config.vocab_size:
        raise FlowspecError(f"{path}: draft_vocab_size {config.draft_vocab_size} is more than vocab_size "
                            f"{config.vocab_size}")
    return config


def head3_layers(directory: Path, config: Any, layers: int) -> tuple[int, ...]:
    """Depths of the head's captured states in fc's order, from config.json, else the default.

    A list that begins with 1 counts layer *outputs*, any other layer *inputs* (as in SGLang).  FlowspecError
    for a wrong number of states, or a layer that the target lacks.
    """
    named = getattr(config, _LAYER_IDS, None) or (getattr(config, "eagle_config", None) or {}).get(_LAYER_IDS)
    if not named:
        return captured_layers(layers)
    path = directory / "config.json"
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise FlowspecError(f"{path}: {_LAYER_IDS} must be a list of layers, not {named!r}")
    if len(named) != CAPTURED:
        raise FlowspecError(f"{path}: {_LAYER_IDS} names {len(named)} layers, "
                            f"an EAGLE-3 head takes {CAPTURED}")
    passed = tuple(layer + (named[0] == 1) for layer in named)
    if min(passed) < 0 or max(passed) > layers:
        raise FlowspecError(f"{path}: {_LAYER_IDS} {named} reaches past the target, which has "
                            f"{layers} layers; a head works with the target that it was trained for only")
    return passed


def _check_fc(directory: Path, stored: dict[str, StoredTensor], config: LlamaConfig) -> None:
    """A clearer error than that of a wrong shape."""
    fc, width = stored.get("fc.weight"), config.target_hidden_size
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != CAPTURED * width:
        raise FlowspecError(f"{directory}: tensor fc.weight takes {fc.shape[1]} values, but {CAPTURED} "
                            f"captured states of width {width} have {CAPTURED * width}")


def _drop_identity(stored: dict[str, StoredTensor], config: LlamaConfig) -> None:
    """Some files hold the identity as the mapping of equal vocabularies."""
    if config.draft_vocab_size == config.vocab_size and "d2t" in stored and not stored["d2t"].read().any():
        stored.pop("d2t")
        stored.pop("t2d", None)


def _check_draft_vocabulary(directory: Path, head: Eagle3Head) -> None:
    if head.config.draft_vocab_size == head.config.vocab_size:
        return
    ids, vocabulary = head.target_ids(), head.config.vocab_size
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < vocabulary:
            raise FlowspecError(f"{directory}: tensor d2t maps a draft token to {extreme}, but the target's "
                                f"vocabulary has {vocabulary} tokens")
    if (distinct := len(ids.unique())) != len(ids):
        raise FlowspecError(f"{directory}: tensor d2t maps {len(ids)} draft tokens to {distinct} "
                            "of the target's")
    marked = int(head.t2d.sum())
    if marked != len(ids) or not head.t2d[ids].all():
        raise FlowspecError(f"{directory}: tensor t2d marks {marked} tokens, which are not the "
                            f"{len(ids)} that d2t maps to")
