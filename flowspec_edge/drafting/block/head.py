"""The model of DFlash, DSpark and JetSpec: some layers of Qwen3 over a block of mask tokens.

The block of a root at position p holds the root's token and mask tokens at p + 1, p + 2, …; its rows see the
text before the root and one another.  Of the text a layer has no rows of its own: keys and values of token i
are projections of the target's inner states of that token, and are computed once.  A slot's output, through
lm_head, ranks the tokens of one depth, whatever stands at the depths between: DSpark's Markov head adds a
bias by the token before.

Sources: papers as in the package's docstring; the published code is named in ``formats``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    rotate_half,
)

from flowspec_edge.drafting.eagle.head_drafter import KeyValueCache
from flowspec_edge.drafting.tree_cache import CacheShape


class BlockConfig(Qwen3Config):
    """Of the head's layers, and beside that:

    captured       after how many of the target's layers the states are captured, in fc's order; they have
                   the head's own width
    block_size     slots, the root's among them
    mask_token_id  the token of the other slots
    from_root      whether the root's own slot ranks its children: there is a depth for every slot
    causal         of each layer: whether a slot sees only the slots before it
    windows        of each layer: how many positions of the text, nearest to a slot and with its own, it sees;
                   None: all
    window_from_root  whether they are the text's last ones for every slot
    markov_rank    width of the Markov head; 0: without one
    markov_gated   whether the slot's output gates it
    own_lm_head    over ``draft_vocab_size`` tokens; False: the target's
    """

    captured: tuple[int, ...] = ()
    block_size: int = 0
    mask_token_id: int | None = None
    from_root: bool = False
    causal: tuple[bool, ...] = ()
    windows: tuple[int | None, ...] = ()
    window_from_root: bool = False
    markov_rank: int = 0
    markov_gated: bool = False
    own_lm_head: bool = False
    draft_vocab_size: int = 0


class MarkovHead(nn.Module):
    """A bias on the logits by the token before, of low rank (DSpark, "vanilla" and "gated")."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj = (nn.Linear(config.hidden_size + rank, rank) if config.markov_gated else None)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """[…] tokens and the slots' outputs […, H] that they precede, to […, D]."""
        before = self.markov_w1(tokens)
        if self.gate_proj is not None:
            before = before * torch.sigmoid(self.gate_proj(torch.cat((hidden, before), -1)))
        bias: Tensor = self.markov_w2(before)
        return bias


class BlockHead(nn.Module):
    """``embed_tokens`` is the target's or the head's own; so is ``lm_head``, which is None for the target's.

    A draft vocabulary smaller than the target's has the buffer ``d2t``, as in EAGLE-3.
    """

    d2t: Tensor

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        config._attn_implementation = "sdpa"
        width, vocabulary, drafted = config.hidden_size, config.vocab_size, config.draft_vocab_size
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.fc = nn.Linear(len(config.captured) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, drafted, bias=False) if config.own_lm_head else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.rotary_emb = LlamaRotaryEmbedding(cast(Any, config))
        if drafted != vocabulary:
            self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64))

    @property
    def depths(self) -> int:
        """How deep below its root a block ranks tokens."""
        return self.config.block_size - (not self.config.from_root)

    def slot_tokens(self, root: int) -> list[int]:
        assert self.config.mask_token_id is not None
        return [root, *[self.config.mask_token_id] * (self.config.block_size - 1)]

    def keys_values(self, states: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of text rows, layer by layer.

        states     [B, n, captured * H]
        positions  [B, n]
        yields     [B, kv_heads, n, head_dim], keys and values
        """
        rows = self.hidden_norm(self.fc(states))
        cos, sin = (angles[:, None] for angles in self.rotary_emb(rows, position_ids=positions))
        heads = (*rows.shape[:2], -1, self.config.head_dim)
        for layer in self.layers:
            attention = cast(Qwen3Attention, layer.self_attn)
            keys = attention.k_norm(attention.k_proj(rows).view(heads)).transpose(1, 2)
            yield keys * cos + rotate_half(keys) * sin, attention.v_proj(rows).view(heads).transpose(1, 2)

    def forward(self, embedded: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: KeyValueCache
                ) -> Tensor:
        """One pass over slots.

        embedded   [B, m, H]     of the slots' tokens
        positions  [B, m]
        masks      [B or 1, 1, m, columns] each, of every layer: bool or additive, over text, then slots
        cache      returns all columns' keys and values for the slots'
        returns    [B, m, H]     after the last norm
        """
        x = embedded
        rotary = self.rotary_emb(x, position_ids=positions)
        for layer, mask in zip(self.layers, masks, strict=True):
            x = layer(x, attention_mask=mask, past_key_values=cast(Any, cache), position_embeddings=rotary)
        normed: Tensor = self.norm(x)
        return normed

    def bias(self, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        """What the tokens before, […], add to the logits of slots with outputs […, H]: […, D]."""
        bias: Tensor | None = None if self.markov_head is None else self.markov_head(tokens, hidden)
        return bias

    def target_ids(self) -> Tensor:
        """The target's id of each draft token: int64 [D]."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.norm.weight.device)
        return ids + self.d2t if "d2t" in self._buffers else ids

    def cache_shape(self) -> CacheShape:
        config, norm = self.config, self.norm.weight  # is never quantised
        return CacheShape(layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads,
                          head_dim=config.head_dim, dtype=norm.dtype, device=norm.device)
