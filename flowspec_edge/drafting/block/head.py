"""The model of DFlash, DFlash2, DSpark and JetSpec: some layers of Qwen3 over a block of mask tokens.

The block of a root at position p holds the root's token and mask tokens at p + 1, p + 2, …; its rows see the
text before the root and one another.  Of the text a layer has no rows of its own: keys and values of token i
are projections of the target's inner states of that token, and are computed once.  A slot's output, through
lm_head, ranks the tokens of one depth, whatever stands at the depths between: DSpark's Markov head adds a
bias by the token before, and so does DFlash2's selector, to the likeliest tokens alone.  DFlash2's layers
have short convolutions along the block, too.

Sources: papers as in the package's docstring; the published code is named in ``formats``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowspec_edge.drafting.tree_cache import CacheShape
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.stage.families.decoder import DecoderLayer
from flowspec_edge.stage.families.norm import Norm, head_norms
from flowspec_edge.stage.families.rotary import Rotary, Rotation
from flowspec_edge.stage.families.self_attention import SelfAttention
from flowspec_edge.util.kernels import HeadNorms, rotate_in_place
from flowspec_edge.util.linears import concatenated, detach_and_join
from flowspec_edge.util.weight_file import random_embedding


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DecoderConfig):
    """The configuration of a block drafter's head: its layers', and the fields below.

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
    conv_kernel_size  slots that a convolution sees, its own and those before it; 0: without convolutions
    conv_group_size   channels that share a change of its kernel
    selector_rank  width of the candidate selector; 0: without one
    selector_top_k tokens of a slot that it ranks; others are no candidates
    own_lm_head    over ``draft_vocab_size`` tokens; False: the target's
    """

    captured: tuple[int, ...]
    block_size: int
    mask_token_id: int
    draft_vocab_size: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    from_root: bool = False
    window_from_root: bool = False
    markov_rank: int = 0
    markov_gated: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    own_lm_head: bool = False


class MarkovHead(nn.Module):
    """A bias on the logits by the token before, of low rank (DSpark, "vanilla" and "gated")."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = random_embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj = (nn.Linear(config.hidden_size + rank, rank) if config.markov_gated else None)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """[…] tokens and the slots' outputs […, H] that they precede, to […, D]."""
        before = self.markov_w1(tokens)
        if self.gate_proj is not None:
            before = before * torch.sigmoid(self.gate_proj(torch.cat((hidden, before), -1)))
        bias: Tensor = self.markov_w2(before)
        return bias


class CandidateSelector(nn.Module):
    """A bias on the logits of a slot's candidates by the token before, of low rank (DFlash2)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank = config.selector_rank
        self.predecessor_codebook = random_embedding(config.vocab_size, rank)
        self.successor_codebook = random_embedding(config.vocab_size, rank)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, tokens: Tensor, hidden: Tensor, candidates: Tensor) -> Tensor:
        """[…] tokens, the slots' outputs […, H] and candidates […, k] that they precede, to […, k]."""
        context = self.predecessor_codebook(tokens) * self.hidden_projection(hidden)
        bias: Tensor = (self.successor_codebook(candidates) * context[..., None, :]).sum(-1)
        return bias


class Convolution(nn.Module):
    """The kernels of two depthwise, causal convolutions along a block: before a sublayer and after it (DFlash2).

    Each slot has kernels of its own.  They are the learned kernels plus a change that is computed from the sublayer's
    input.  The channels of a group share this change.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self._taps, self._shared = config.conv_kernel_size, config.conv_group_size
        width = config.hidden_size
        self.base_kernel = nn.Parameter(torch.empty(2, self._taps, width))
        self.kernel_projection = nn.Linear(width, 2 * self._taps * width // self._shared, bias=False)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both kernels, [..., m, taps, H] each, for the sublayer's input [..., m, H]."""
        change = self.kernel_projection(x).unflatten(-1, (2, self._taps, -1))
        before, after = (change.repeat_interleave(self._shared, -1) + self.base_kernel).unbind(-3)
        return before, after


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """[..., m, H] by [..., m, taps, H]: tap t reads the slot t places before, and zeros before the first one."""
    out = x * kernel[..., 0, :]
    for tap in range(1, kernel.shape[-2]):
        out = out + F.pad(x, (0, 0, tap, 0))[..., :-tap, :] * kernel[..., tap, :]
    return out


class BlockAttention(SelfAttention):
    """Queries have a product of their own: text rows need keys and values alone."""

    _key_norms: HeadNorms

    def prepare(self) -> None:
        if hasattr(self, "k_proj"):
            self.kv_proj = detach_and_join(self, "k_proj", "v_proj")
            self.qkv_proj = concatenated((self.q_proj, self.kv_proj))
            del self.q_proj
        super().prepare()
        self._key_norms = head_norms((self.k_norm, self._kv_heads))

    def keys_values(self, rows: Tensor, rotation: Rotation) -> Tensor:
        """Compute keys and values of normed rows [N, H].

        They are as ``KVCache.write`` takes them: [N, 2, kv_heads, head_dim].
        """
        keys_values: Tensor = self.kv_proj(rows).view(len(rows), 2, self._kv_heads, self._width)
        self._key_norms.in_place(keys_values[:, 0])
        rotate_in_place(keys_values[:, 0], (rotation.cos, rotation.sin))
        return keys_values


class BlockLayer(DecoderLayer):
    def __init__(self, config: BlockConfig, index: int) -> None:
        super().__init__(config, index)
        self.self_attn = BlockAttention(config, index)


class ConvolvedLayer(BlockLayer):
    """A layer whose sublayers have convolutions around them; ``forward`` is over one block."""

    def __init__(self, config: BlockConfig, index: int) -> None:
        super().__init__(config, index)
        self.attention_conv, self.mlp_conv = Convolution(config), Convolution(config)

    def prepare(self) -> None:
        for part in (self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm):
            cast(Any, part).prepare()

    def forward(self, rows: Tensor, rotation: Rotation, mask: Any, cache: Any, new: int) -> Tensor:
        x = self.input_layernorm(rows)
        before, after = self.attention_conv.kernels(x)
        begun = self.mixer.before(convolved(x, before), rotation)
        attended = self.mixer.finish(begun, self.attend(begun, mask, cache, new))
        rows += convolved(self.mixer.projection(attended), after)
        x = self.post_attention_layernorm(rows)
        before, after = self.mlp_conv.kernels(x)
        rows += convolved(cast(nn.Module, self.mlp)(convolved(x, before)), after)
        return rows


class BlockHead(nn.Module):
    """A block drafter's head; ``embed_tokens`` is the target's or the head's own.

    So is ``lm_head``, which is None for the target's. A draft vocabulary smaller than the target's has the buffer
    ``d2t``,
    as in EAGLE-3.
    """

    d2t: Tensor

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self._rotary: Rotary | None = None
        width, vocabulary, drafted = config.hidden_size, config.vocab_size, config.draft_vocab_size
        self.embed_tokens: nn.Module = random_embedding(vocabulary, width)
        self.fc = nn.Linear(len(config.captured) * width, width, bias=False)
        self.hidden_norm = Norm(width, config.rms_norm_eps)
        layer = ConvolvedLayer if config.conv_kernel_size else BlockLayer
        self.layers = nn.ModuleList(layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, drafted, bias=False) if config.own_lm_head else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        if drafted != vocabulary:
            self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64))

    def prepare(self) -> None:
        """Join matrices that multiply the same rows, as ``DraftHead.prepare``."""
        if self._rotary is None:
            self.hidden_norm.prepare()
            for layer in self._layers():
                layer.prepare()
            self.norm.prepare()
            self._rotary = Rotary(self.config, self.norm.weight.device)

    def _layers(self) -> Iterator[BlockLayer]:
        return (cast(BlockLayer, layer) for layer in self.layers)

    def _rotation(self, positions: Tensor) -> Rotation:
        assert self._rotary is not None, "prepare() comes before the first pass"
        return self._rotary(positions, self.config.turns[0], self.norm.weight.dtype)

    @property
    def depths(self) -> int:
        """How deep below its root a block ranks tokens."""
        return self.config.block_size - (not self.config.from_root)

    def slot_tokens(self, root: int) -> list[int]:
        return [root, *[self.config.mask_token_id] * (self.config.block_size - 1)]

    def keys_values(self, states: Tensor, positions: Tensor) -> Iterator[Tensor]:
        """Yield the text rows' keys and values, layer by layer.

        states     [n, captured * H]
        positions  [n]
        yields     [n, 2, kv_heads, head_dim]
        """
        rows, rotation = self.hidden_norm(self.fc(states)), self._rotation(positions)
        for layer in self._layers():
            yield layer.mixer.keys_values(rows, rotation)

    def forward(self, embedded: Tensor, positions: Tensor, masks: Sequence[Any], cache: Any) -> Tensor:
        """One pass over the slots of a block.

        embedded   [m, H]     of the slots' tokens; is overwritten
        positions  [m]
        masks      of every layer, as layers of stages take them: over text, then slots
        cache      returns all columns' keys and values for the slots'
        returns    [m, H]     after the last norm
        """
        rotation = self._rotation(positions)
        for layer, mask in zip(self._layers(), masks, strict=True):
            layer(embedded, rotation, mask, cache, len(embedded))
        normed: Tensor = self.norm(embedded)
        return normed

    def after(self, tokens: Tensor, hidden: Tensor, logits: Tensor, candidates: Tensor | None = None
              ) -> Tensor:
        """Logits […, D] of slots with outputs […, H] after the tokens […]; -inf for what is no candidate.

        candidates  […, selector_top_k], the slots' likeliest tokens: of a head with a selector
        """
        if self.markov_head is not None:
            return logits + self.markov_head(tokens, hidden).to(logits.dtype)
        if self.candidate_selector is None or candidates is None:
            return logits
        ranked = logits.gather(-1, candidates) + self.candidate_selector(tokens, hidden, candidates)
        return torch.full_like(logits, float("-inf")).scatter(-1, candidates, ranked)

    def target_ids(self) -> Tensor:
        """Return the target's id of each draft token: int64 [D]."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.norm.weight.device)
        return ids + self.d2t if "d2t" in self._buffers else ids

    def cache_shape(self) -> CacheShape:
        # The norm is never quantised.
        return CacheShape.from_config(self.config, self.config.num_hidden_layers, self.norm.weight)
