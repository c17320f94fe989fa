"""The EAGLE-3 draft head: one decoder layer that continues three of the target's inner states.

Knows the head's arithmetic and how its rows pair states with tokens.  Does not know the target: the
embeddings and the states are tensors that the caller hands over.

Row i pairs h_i, fused from three inner states of token i, with token i + 1 and stands at position
i.  Its output approximates h_{i+1}; after the head's own norm and lm_head it ranks the children of
token i + 1, over a draft vocabulary that may be a part of the target's.  A tree row takes its
parent's *output*, before the norm, in place of the states that the target has not computed yet.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from flowspec_edge.drafting.eagle import KeyValues

CAPTURED = 3  # inner states of the target that a row is fused from


class Eagle3Layer(nn.Module):
    """A Llama decoder layer whose attention reads [embedding; hidden], each under a norm of its own."""

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


class Eagle3Head(nn.Module):
    """fc over the captured states, one layer, a norm and an lm_head of its own.

    ``config`` is a LlamaConfig with ``target_hidden_size`` and ``draft_vocab_size`` beside its own
    fields; ``vocab_size`` is the target's.  With fewer draft tokens than target tokens there are the
    buffers ``d2t`` (int64 [draft_vocab]: target id minus draft id) and ``t2d`` (bool [vocab]: is a
    draft token).
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        config._attn_implementation = "sdpa"
        width, vocabulary, drafted = config.hidden_size, config.vocab_size, config.draft_vocab_size
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.fc = nn.Linear(CAPTURED * config.target_hidden_size, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, drafted, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if drafted != vocabulary:
            self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(vocabulary) < drafted)

    def fuse(self, states: Tensor) -> Tensor:
        """[..., 3 * target_H], the captured states in the layers' order, to h: [..., H].

        What has the head's width already is handed back (the published convention).
        """
        if states.shape[-1] == self.config.hidden_size:
            return states
        fused: Tensor = self.fc(states)
        return fused

    def forward(self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor,
                cache: KeyValues) -> Tensor:
        """One pass over n rows of each of B sequences.

        hidden     [B, n, H]     h_i, fused, or the output of the row before it
        tokens     [B, n]        token i + 1, int64
        positions  [B, n]        i
        mask       [B, 1, n, m]  bool: True where a row attends to one of the cache's m rows
        returns    [B, n, H]     the approximation of h_{i+1}: what the recurrence feeds back
        """
        layer = self.midlayer
        x = torch.cat((layer.input_layernorm(self.embed_tokens(tokens)), layer.hidden_norm(hidden)), dim=-1)
        attended, _ = layer.self_attn(
            x, position_embeddings=self.rotary_emb(x, position_ids=positions),
            attention_mask=mask, past_key_values=cache,
        )
        x = hidden + attended
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Row outputs [..., H] to logits over the draft vocabulary: [..., draft_vocab]."""
        return cast(Tensor, self.lm_head(self.norm(hidden)))

    def target_ids(self) -> Tensor:
        """int64 [draft_vocab]: the target's id of each draft token."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return ids + self.d2t if "d2t" in self._buffers else ids
