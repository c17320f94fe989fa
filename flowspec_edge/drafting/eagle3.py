"""The EAGLE-3 draft head: one decoder layer that continues three of the target's inner states.

Knows the head's arithmetic and how its rows pair states with tokens.  Does not know the target: the
embeddings and the states are tensors that the caller hands over.

Row i pairs h_i, fused from three inner states of token i, with token i + 1 and stands at position
i.  Its output approximates h_{i+1}; after the head's own norm and lm_head it ranks the children of
token i + 1, over a draft vocabulary that may be a part of the target's.  A tree row takes its
parent's *output*, before the norm, in place of the states that the target has not computed yet.

How the states come.  The stages that compute them send them to D0 in Tap messages: in 16 bit three
times 2 bytes a value, each over one link, beside the segment's own way.  fc is linear, so every stage
could instead add its share to an accumulator that travels with the segment; but sums of shares need
float32, so that is 4 bytes a value on each of up to N hops, from two stages on more than the 6 bytes
of the taps, and on the way that the next token waits for: a hop would carry three times the bytes of
the hidden states alone.  And each stage would hold its columns of fc.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from flowspec_edge.drafting.eagle import HeadDrafter, KeyValues
from flowspec_edge.errors import ProtocolError
from flowspec_edge.messages import Tap
from flowspec_edge.sampling import DraftVocabulary, Rank, Sampling
from flowspec_edge.tensors import to_device, to_torch

CAPTURED = 3  # inner states of the target that a row is fused from


def captured_layers(layers: int) -> tuple[int, ...]:
    """The states that EAGLE-3 captures of a target of so many ``layers``: the inputs of its layers 2,
    n // 2 and n - 3, in rising order and as far as it has them; so many layers a row has passed."""
    first, last = min(1, layers - 1), layers - 1
    return tuple(sorted(min(max(layer, first), last) for layer in (2, layers // 2, layers - 3)))


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
        mask       [B, 1, n, m]  what a row attends to of the cache's m rows: bool, or additive
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


class Eagle3Drafter(HeadDrafter):
    """Drafts with an EAGLE-3 head.

    ``layers``: after how many of the target's layers its three states are captured, in the order in
    which ``fc`` takes them; a layer may be named twice.
    """

    def __init__(self, head: Eagle3Head, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self.taps = tuple(sorted(set(layers)))
        self._tapped: dict[int, dict[int, Tensor]] = {}  # number -> layer -> state [target_H]
        drafted = None
        if head.config.draft_vocab_size != head.config.vocab_size:
            drafted = DraftVocabulary(head.target_ids().cpu().numpy(), head.config.vocab_size)
        self._fuse = head.fuse
        super().__init__(head, head.logits, drafted)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        super().reset(sampling, rank, tau)
        self._tapped.clear()

    def rewind(self, tokens: int, sampling: Sampling, rank: Rank, tau: float) -> bool:
        self._tapped.clear()  # under the numbers of the session before
        return super().rewind(tokens, sampling, rank, tau)

    def tap(self, message: Tap) -> None:
        if message.layer in self.taps:
            states = to_device(to_torch(message.hidden), self._device).to(self._dtype)
            for number, state in zip(message.numbers.tolist(), states, strict=True):
                self._tapped.setdefault(number, {})[message.layer] = state

    def _known(self, features: Tensor, rows: Sequence[int]) -> Tensor:
        known = torch.stack([torch.cat([self._state(row, layer) for layer in self._layers]) for row in rows])
        # Nothing older can predict a token any more.
        self._tapped = {n: states for n, states in self._tapped.items() if n >= rows[-1]}
        return known

    def _state(self, row: int, layer: int) -> Tensor:
        state = self._tapped.get(row, {}).get(layer)
        if state is None:
            raise ProtocolError(f"the state of row {row} after {layer} layers is missing: a token that it "
                                "predicted was committed before its taps came")
        return state

    def _enter(self, known: Tensor) -> Tensor:
        return self._fuse(known)
