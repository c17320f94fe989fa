"""The EAGLE-3 draft head: one decoder layer that continues some of the target's inner states.

Row i pairs h_i, fused from inner states of token i (usually three), with token i + 1, at position i.  Its
output approximates h_{i+1}; the head's own norm and lm_head rank the children of token i + 1, over a draft
vocabulary that may be a part of the target's.  A tree row uses its parent's *output*, before the norm
(after it in heads with ``norm_output``).  :class:`Eagle3Head` lists the variants; ``eagle3_formats`` reads
them as they are published.

Stages send the states to D0 in Tap messages: 2 bytes a value, each over one link, off the segment's path.
fc is linear, so stages could instead add to an accumulator in the segment, but sums need float32: 4 bytes a
value on up to N hops of the critical path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from flowspec_edge.drafting.candidates import CandidateHead
from flowspec_edge.drafting.eagle.head_drafter import ATTENTION, FusibleHead, HeadDrafter, KeyValueCache
from flowspec_edge.drafting.fused import DraftLayer
from flowspec_edge.drafting.recorded import RecordedPasses
from flowspec_edge.drafting.tapped import TappedStates
from flowspec_edge.drafting.tree_cache import CacheMemory
from flowspec_edge.messages import Tap
from flowspec_edge.model.output_head import MatrixRows, OutputHead
from flowspec_edge.sampling.rule import DraftVocabulary, Rank, Sampling
from flowspec_edge.util.kernels import RmsNorm

CAPTURED = 3  # inner states of the target per row, where a head does not say otherwise


def captured_layers(layers: int) -> tuple[int, ...]:
    """Depths of EAGLE-3's states: the inputs of layers 2, n // 2 and n - 3, rising, within the model."""
    first, last = min(1, layers - 1), layers - 1
    return tuple(sorted(min(max(layer, first), last) for layer in (2, layers // 2, layers - 3)))


def states_of(config: LlamaConfig) -> int:
    """How many of the target's inner states a head takes a row."""
    return int(getattr(config, "num_aux_hidden_states", None) or CAPTURED)


class Eagle3Layer(nn.Module):
    """A Llama decoder layer whose attention reads [embedding; hidden], each with its own norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        attention = Qwen3Attention if getattr(config, "qk_norm", False) else LlamaAttention
        self.self_attn: nn.Module = attention(cast(Any, config), layer_idx=0)
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
    id) and ``t2d`` (bool [vocab]: is a draft token).  Optional, each with EAGLE-3's as the default:

    num_aux_hidden_states  how many states fc takes
    fc_norm                each of them is normed first, with weights of its own
    norm_before_fc         all of them together are normed first
    norm_before_residual   the layer's first residual is the normed h, not h
    qk_norm                queries and keys are normed head by head, as in Qwen3
    norm_output            a row's output is normed already (EAGLE-3.1)
    own_lm_head            true; if false the target's lm_head ranks, with its rows of the draft vocabulary
    candidate_rank         the factor's, of a head whose lm_head ranks no more than ``num_candidates`` tokens of a row
                           (EAGLE-4, ``drafting.candidates``)
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        config._attn_implementation = ATTENTION
        width, vocabulary, draft_tokens = config.hidden_size, config.vocab_size, config.draft_vocab_size
        self.embed_tokens = nn.Embedding(vocabulary, width)
        states, target_width = states_of(config), config.target_hidden_size
        self.fc = nn.Linear(states * target_width, width, bias=False)
        eps, given = config.rms_norm_eps, partial(getattr, config)
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(target_width, eps) for _ in range(states)
                                     ) if given("fc_norm", False) else None
        self.input_norm = LlamaRMSNorm(states * target_width, eps) if given("norm_before_fc", False) else None
        self._norms_residual: bool = given("norm_before_residual", False)
        self._norms_output: bool = given("norm_output", False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        own = given("own_lm_head", True)
        self.lm_head: Any = nn.Linear(width, draft_tokens, bias=False) if own else None
        rank = given("candidate_rank", 0)
        if rank:  # by their published names; the small factor is not quantised
            self.efficient_lm_head: Any = nn.Linear(rank, draft_tokens, bias=False)
            self.efficient_lm_head_down_proj = MatrixRows(torch.empty(rank, width))
        self._candidate_head: list[CandidateHead] = []  # of the modules above, not one of its own
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if draft_tokens != vocabulary:
            self.register_buffer("d2t", torch.zeros(draft_tokens, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(vocabulary) < draft_tokens)

    def fuse(self, states: Tensor) -> Tensor:
        """The captured states of rows, [..., states * target_H], to h [..., H]."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(states)
        return fused

    def forward(self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor,
                cache: KeyValueCache) -> Tensor:
        """As :meth:`EagleHead.forward`, with h_i for f_i: fused, or the output of the row before it."""
        layer = self.midlayer
        if self.fused is not None:
            rows, embedded = hidden[0], self.embedded(tokens)[0]
            normed = self._hidden_norm(rows)
            x = torch.cat((self._input_norm(embedded), normed), -1)
            residual = normed if self._norms_residual else rows
            out = self.fused(x, residual, self.rotary_emb(x, position_ids=positions), mask, cache)[None]
            return cast(Tensor, self._output_norm(out) if self._norms_output else out)
        normed = layer.hidden_norm(hidden)
        x = torch.cat((layer.input_layernorm(self.embedded(tokens)), normed), dim=-1)
        attended, _ = layer.self_attn(
            x, position_embeddings=self.rotary_emb(x, position_ids=positions),
            attention_mask=mask, past_key_values=cache,
        )
        x = (normed if self._norms_residual else hidden) + attended
        out = x + layer.mlp(layer.post_attention_layernorm(x))
        return cast(Tensor, self.norm(out) if self._norms_output else out)

    def _fused_layer(self) -> DraftLayer:
        layer = self.midlayer
        self._input_norm, self._hidden_norm, self._output_norm = map(
            RmsNorm.of, (layer.input_layernorm, layer.hidden_norm, self.norm))
        return DraftLayer(layer.self_attn, layer.mlp, layer.post_attention_layernorm)

    def logits(self, hidden: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """Row outputs [..., H] to [..., draft_vocab]; ``lm_head``: for a head without its own."""
        if not self._norms_output:
            hidden = self.norm(hidden) if self.fused is None else self._output_norm(hidden)
        ranks = lm_head if self.lm_head is None else self._ranking
        assert ranks is not None
        return cast(Tensor, ranks(hidden))

    @property
    def _ranking(self) -> nn.Module:
        """Its own lm_head, or the candidate head over it."""
        if not getattr(self.config, "candidate_rank", 0):
            return cast(nn.Module, self.lm_head)
        if not self._candidate_head:  # when the matrices are where, and in the bits in which, they are used
            norm = self.norm.weight
            exact = OutputHead([self.lm_head], self.config.hidden_size, norm.dtype, norm.device)
            self._candidate_head = [CandidateHead(exact, self.efficient_lm_head_down_proj, self.efficient_lm_head,
                                                  self.config.num_candidates)]
        return self._candidate_head[0]

    def shared_lm_head(self, target: OutputHead) -> nn.Module | None:
        """What ranks in the place of an lm_head of the head's own: the target's rows of the draft vocabulary;
        None if it has one."""
        if self.lm_head is not None:
            return None
        return target.chosen(self.target_ids()) if "d2t" in self._buffers else target

    def target_ids(self) -> Tensor:
        """The target's id of each draft token: int64 [draft_vocab]."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.norm.weight.device)
        return ids + self.d2t if "d2t" in self._buffers else ids


class Eagle3Drafter(HeadDrafter):
    """``layers``: after how many target layers the states are captured, in ``fc``'s order; they may
    repeat.  ``lm_head``: the target's, for a head without its own."""

    def __init__(self, head: Eagle3Head, layers: Sequence[int], memory: CacheMemory | None = None,
                 recorded: RecordedPasses | None = None, lm_head: nn.Module | None = None) -> None:
        weight = head.norm.weight  # is never quantised
        self._tapped = TappedStates(layers, weight.dtype, weight.device)
        self.taps = self._tapped.taps
        vocabulary = None
        if head.config.draft_vocab_size != head.config.vocab_size:
            vocabulary = DraftVocabulary(head.target_ids().cpu().numpy(), head.config.vocab_size)
        self._fuse = head.fuse
        logits = head.logits if head.lm_head is not None else partial(head.logits, lm_head=lm_head)
        super().__init__(head, logits, vocabulary, memory, recorded)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        super().reset(sampling, rank, tau)
        self._tapped.clear()

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        self._tapped.clear()  # the numbers are another session's
        return super().rewind(tokens, sampling, rank, tau)

    def tap(self, message: Tap) -> None:
        self._tapped.tap(message)

    def _text_states(self, features: Tensor, rows: Sequence[int]) -> Tensor:
        return self._tapped.take(rows)

    def _to_head_input(self, states: Tensor) -> Tensor:
        return self._fuse(states)
