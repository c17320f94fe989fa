"""The EAGLE-1/2 draft head: one decoder layer that continues the target's features.

Knows the head's arithmetic and how its rows pair features with tokens.  Does not know the target:
lm_head and embedding are tensors that the caller hands over.

Row i pairs feature f_i (the target's post-norm hidden state of token i) with token i + 1 and
stands at position i.  Its output approximates f_{i+1}, so lm_head on it ranks the children of
token i + 1.  A tree row takes its parent's *output* in place of the feature that the target has
not computed yet; the text's rows always have true features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from flowspec_edge.drafting.tree_cache import CacheShape
from flowspec_edge.drafting.tree_drafter import TreeDrafter
from flowspec_edge.errors import ProtocolError
from flowspec_edge.sampling import DraftVocabulary, Rank, Sampling
from flowspec_edge.tensors import indices
from flowspec_edge.tree.requests import DraftNode


class KeyValues(Protocol):
    """The one method of transformers' caches that its attention class calls."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Take the rows' keys and values; return those that the mask's columns stand for."""


class EagleLayer(nn.Module):
    """A Llama decoder layer without the norm in front of the attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn: nn.Module = LlamaAttention(config, layer_idx=0)
        if getattr(config, "qkv_bias", False):  # heads of Qwen2: biases on these three only
            for name in ("q_proj", "k_proj", "v_proj"):
                plain = getattr(self.self_attn, name)
                setattr(self.self_attn, name, nn.Linear(plain.in_features, plain.out_features))
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class EagleHead(nn.Module):
    """fc([embedding of token i + 1; f_i]), one layer, no final norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        config._attn_implementation = "sdpa"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor,
                cache: KeyValues) -> Tensor:
        """One pass over n rows of each of B sequences.

        features   [B, n, H]     f_i, true or approximated
        tokens     [B, n]        token i + 1, int64
        positions  [B, n]        i
        mask       [B, 1, n, m]  what a row attends to of the cache's m rows: bool, or additive
        returns    [B, n, H]     the approximation of f_{i+1}
        """
        x = self.fc(torch.cat((self.embed_tokens(tokens), features), dim=-1))
        rotary = self.rotary_emb(x, position_ids=positions)
        layer = cast(EagleLayer, self.layers[0])
        attended, _ = layer.self_attn(
            x, position_embeddings=rotary, attention_mask=mask, past_key_values=cache
        )
        x = x + attended
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out


class HeadDrafter(TreeDrafter):
    """What drafting with a head of either kind has in common: rows that pair a state with a token.

    ``head`` is a module that is called like :meth:`EagleHead.forward`, with its ``config`` and
    ``fc``; it already has its embedding.  The rest is :class:`TreeDrafter`'s.
    """

    rows_behind = 1

    def __init__(self, head: nn.Module, logits: Callable[[Tensor], Tensor],
                 drafted: DraftVocabulary | None = None) -> None:
        self._head = head.eval().requires_grad_(False)
        self._states: list[Tensor] = []  # of queued text rows, [n, width] each, in their order
        config: LlamaConfig = head.config
        fc = cast(nn.Linear, head.fc)
        self._dtype, self._device = fc.weight.dtype, fc.weight.device
        shape = CacheShape(
            layers=1,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            dtype=self._dtype, device=self._device, window=config.max_position_embeddings,
        )
        super().__init__(shape, logits, drafted)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        super().reset(sampling, rank, tau)
        self._states.clear()

    def _forget_rows(self, queued: int) -> None:
        super()._forget_rows(queued)
        self._states = [torch.cat(self._states)[:queued].clone()] if queued else []

    @abstractmethod
    def _known(self, features: Tensor, rows: Sequence[int]) -> Tensor:
        """What text rows are made of: for each row that ``features`` and ``rows`` name, [n, width]."""

    @abstractmethod
    def _enter(self, known: Tensor) -> Tensor:
        """[n, width] of text rows as the head takes it: [n, H]."""

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        if features is None:
            if self._text_length or len(tokens) != 1:
                raise ProtocolError("only the first token of a text comes without its feature")
            self._text_length = 1
            return
        if len(features) != len(tokens) or not self._text_length:
            raise ProtocolError(
                f"{len(tokens)} committed tokens need as many features after the text's first "
                f"token, not {len(features)} after {self._text_length}"
            )
        if not tokens:
            return
        self._states.append(self._known(features, rows))
        self._queue.extend(tokens)
        self._text_length += len(tokens)

    def _rows(self, text: list[int], nodes: list[DraftNode], mask: Tensor) -> Tensor:
        entering = [self._enter(torch.cat(self._states))] if text else []
        entering += [torch.stack([self._outputs[node.parent] for node in nodes])] if nodes else []
        self._states.clear()
        start = self._cache.committed - len(text)
        # Text rows stand at 0, 1, ...: row i holds token i + 1.  So a node's row is one below it.
        block = indices([[*text, *(node.token for node in nodes)],
                         [*range(start, start + len(text)), *(node.position - 1 for node in nodes)]],
                        self._device)
        out: Tensor = self._head(torch.cat(entering)[None], block[:1], block[1:], mask, self._cache)
        return out[0]


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE-1/2 head.

    ``lm_head`` is the target's, [V, H], of the head's dtype and on its device; ``head`` already
    has its embedding (:func:`flowspec_edge.drafting.load.load_drafter` puts both together).
    """

    def __init__(self, head: EagleHead, lm_head: Tensor) -> None:
        super().__init__(head, lambda outputs: F.linear(outputs, lm_head))

    def _known(self, features: Tensor, rows: Sequence[int]) -> Tensor:
        return features.to(self._device, self._dtype)

    def _enter(self, known: Tensor) -> Tensor:
        return known
