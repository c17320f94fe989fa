"""The EAGLE-3 draft head: one decoder layer that continues some of the target's inner states.

Row i pairs h_i, fused from inner states of token i (usually three), with token i + 1, at position i.  Its
output approximates h_{i+1}; the head's own norm and lm_head rank the children of token i + 1, over a draft
vocabulary that may be a part of the target's.  A tree row uses its parent's *output*, before the norm
(after it in heads with ``norm_output``).  :class:`Eagle3Config` lists the variants; ``eagle3_formats`` reads
them as they are published.

Stages send the states to D0 in Tap messages: 2 bytes a value, each over one link, off the segment's path.
fc is linear, so stages could instead add to an accumulator in the segment, but sums need float32: 4 bytes a
value on up to N hops of the critical path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowspec_edge.drafting.candidates import CandidateHead
from flowspec_edge.drafting.eagle.head_drafter import DraftHead, HeadDrafter
from flowspec_edge.drafting.recorded import RecordedPasses
from flowspec_edge.drafting.tapped import TappedStates
from flowspec_edge.drafting.tree_cache import CacheMemory
from flowspec_edge.messages import Tap
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.output_head import MatrixRows, OutputHead
from flowspec_edge.sampling.rule import DraftVocabulary, Rank, Sampling
from flowspec_edge.stage.families.decoder import DecoderLayer
from flowspec_edge.stage.families.norm import Norm
from flowspec_edge.stage.families.self_attention import SelfAttention
from flowspec_edge.util.weight_file import random_embedding

CAPTURED = 3  # inner states of the target per row, where a head does not say otherwise


def captured_layers(layers: int) -> tuple[int, ...]:
    """Depths of EAGLE-3's states: the inputs of layers 2, n // 2 and n - 3, rising, within the model."""
    first, last = min(1, layers - 1), layers - 1
    return tuple(sorted(min(max(layer, first), last) for layer in (2, layers // 2, layers - 3)))


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DecoderConfig):
    """The configuration of an EAGLE-3 head: its layer's, and the fields below, with EAGLE-3's values as defaults.

    The layer norms queries and keys if it is Qwen3's.

    target_hidden_size     width of the target's states
    draft_vocab_size       tokens that it drafts; ``vocab_size`` is the target's
    num_aux_hidden_states  how many states fc takes
    captured               after how many of the target's layers they are captured, in fc's order; None:
                           :func:`captured_layers`
    fc_norm                each of them is normed first, with weights of its own
    norm_before_fc         all of them together are normed first
    norm_before_residual   the layer's first residual is the normed h, not h
    norm_output            a row's output is normed already (EAGLE-3.1)
    own_lm_head            if false the target's lm_head ranks, with its rows of the draft vocabulary
    candidate_rank         the factor's, of a head whose lm_head ranks no more than ``num_candidates`` tokens of a row
                           (EAGLE-4, ``drafting.candidates``)
    """

    target_hidden_size: int
    draft_vocab_size: int
    num_aux_hidden_states: int = CAPTURED
    captured: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_lm_head: bool = True
    candidate_rank: int = 0
    num_candidates: int = 0


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose attention reads [embedding; hidden], each with its own norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, 0)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, 0, inputs=2 * config.hidden_size)


class Eagle3Head(DraftHead):
    """fc over the captured states, one layer, a norm and an lm_head of its own.

    A draft vocabulary smaller than the target's adds the buffers ``d2t`` (int64 [draft_vocab]: target id minus draft
    id) and ``t2d`` (bool [vocab]: is a draft token).
    """

    config: Eagle3Config
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        width, vocabulary, draft_tokens = config.hidden_size, config.vocab_size, config.draft_vocab_size
        self.embed_tokens = random_embedding(vocabulary, width)
        states, target_width, eps = config.num_aux_hidden_states, config.target_hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(states * target_width, width, bias=False)
        self.fc_norm = (nn.ModuleList(Norm(target_width, eps) for _ in range(states)) if config.fc_norm else None)
        self.input_norm = Norm(states * target_width, eps) if config.norm_before_fc else None
        self.midlayer = Eagle3Layer(config)
        self.norm = Norm(width, eps)
        self.lm_head: Any = nn.Linear(width, draft_tokens, bias=False) if config.own_lm_head else None
        rank = config.candidate_rank
        if rank:  # by their published names; the small factor is not quantised
            self.efficient_lm_head: Any = nn.Linear(rank, draft_tokens, bias=False)
            self.efficient_lm_head_down_proj = MatrixRows(torch.empty(rank, width))
        self._candidate_head: list[CandidateHead] = []  # of the modules above, not one of its own
        if draft_tokens != vocabulary:
            self.register_buffer("d2t", torch.zeros(draft_tokens, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(vocabulary) < draft_tokens)

    @property
    def layer(self) -> Eagle3Layer:
        return self.midlayer

    def fuse(self, states: Tensor) -> Tensor:
        """Return the captured states of rows, [..., states * target_H], to h [..., H]."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(states)
        return fused

    def forward(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Any, cache: Any) -> Tensor:
        """Compute rows' outputs from ``states``: h_i, fused, or the outputs of the rows before."""
        layer = self.midlayer
        normed = layer.hidden_norm(states)
        x = torch.cat((layer.input_layernorm(self.embedded(tokens)), normed), dim=-1)
        rows: Tensor = normed if self.config.norm_before_residual else states.clone()  # the layer writes to it
        begun = layer.mixer.before(x, self.rotation(positions))
        layer.after(rows, begun, layer.attend(begun, mask, cache, len(rows)))
        return cast(Tensor, self.norm(rows)) if self.config.norm_output else rows

    def logits(self, hidden: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """Row outputs [..., H] to [..., draft_vocab]; ``lm_head``: for a head without its own."""
        if not self.config.norm_output:
            hidden = self.norm(hidden)
        ranks = lm_head if self.lm_head is None else self._ranking
        assert ranks is not None
        return cast(Tensor, ranks(hidden))

    @property
    def _ranking(self) -> nn.Module:
        """Its own lm_head, or the candidate head over it."""
        if not self.config.candidate_rank:
            return cast(nn.Module, self.lm_head)
        if not self._candidate_head:  # when the matrices are where, and in the bits in which, they are used
            norm = self.norm.weight
            exact = OutputHead([self.lm_head], self.config.hidden_size, norm.dtype, norm.device)
            self._candidate_head = [CandidateHead(exact, self.efficient_lm_head_down_proj, self.efficient_lm_head,
                                                  self.config.num_candidates)]
        return self._candidate_head[0]

    def shared_lm_head(self, target: OutputHead) -> nn.Module | None:
        """Return what ranks in the place of an lm_head of the head's own: the target's rows of the draft vocabulary.

        None if it has one.
        """
        if self.lm_head is not None:
            return None
        return target.restrict_to(self.target_ids()) if "d2t" in self._buffers else target

    def target_ids(self) -> Tensor:
        """Return the target's id of each draft token: int64 [draft_vocab]."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.norm.weight.device)
        return ids + self.d2t if "d2t" in self._buffers else ids


class Eagle3Drafter(HeadDrafter):
    """A session's drafter with an EAGLE-3 head.

    layers   after how many target layers the states are captured, in ``fc``'s order; they may repeat
    lm_head  the target's, for a head without its own
    """

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
