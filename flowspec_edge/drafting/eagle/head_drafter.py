"""The common part of drafting with EAGLE-1/2 and EAGLE-3 heads, and with a model's own MTP layer.

A head's layer is a layer of a stage (``stage.families``); what surrounds it is the head's own.

Draft passes of several requests are one: their rows go through a head's linear layers and lm_head together.
A pass takes about the time of reading the head's weights, so one for four requests takes hardly longer than
one for one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.recorded import PassInputs, PassModel, RecordedPasses
from flowspec_edge.drafting.tree_cache import CacheMemory, CacheShape
from flowspec_edge.drafting.tree_drafter import Rows, TreeDrafter
from flowspec_edge.errors import ProtocolError
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.sampling.rule import DraftVocabulary, Rank, Sampling
from flowspec_edge.stage.families.decoder import DecoderLayer
from flowspec_edge.stage.families.rotary import Rotary, RotaryTable, Rotation
from flowspec_edge.util.weight_file import EmbeddingTable


class DraftHead(nn.Module, ABC):
    """A layer over the target's states and the embeddings of tokens; call :meth:`prepare` once it is loaded.

    ``config``: of the layer.
    """

    config: DecoderConfig
    embed_tokens: Any

    def __init__(self) -> None:
        super().__init__()
        self._rotary: RotaryTable | None = None

    @property
    @abstractmethod
    def layer(self) -> DecoderLayer: ...

    @abstractmethod
    def forward(self, states: Tensor, tokens: Tensor, positions: Tensor, mask: Any, cache: Any) -> Tensor:
        """One pass over n rows.

        states     [n, H]   the target's, or an output for the row before
        tokens     [n]      those that come after the states, int64; or their embeddings, [n, H]
        positions  [n]      of the states
        mask, cache         as layers of stages take them
        returns    [n, H]   approximates the next states
        """

    def prepare(self) -> None:
        """Join matrices that multiply the same rows.

        Before the first pass, where the weights will be used and in the dtype of all passes. A second call does
        nothing.
        """
        if self._rotary is None:
            _prepare_below(self)
            weight = self.weight
            self._rotary = RotaryTable(Rotary(self.config, weight.device), self.config.turns[0], weight.dtype,
                                       weight.device)

    @property
    def weight(self) -> Tensor:
        """One that is never quantised."""
        return self.layer.post_attention_layernorm.weight

    def rotation(self, positions: Tensor) -> Rotation:
        """Return the rotation of rows at ``positions`` [n], which have been reached."""
        return self._prepared(positions)

    def reach(self, position: int) -> None:
        """Make room for positions up to this one."""
        self._prepared.reach(position)

    @property
    def _prepared(self) -> RotaryTable:
        assert self._rotary is not None, "prepare() comes before the first pass"
        return self._rotary

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of ``tokens``: int64 [n], or embeddings [n, H] already."""
        return tokens if tokens.is_floating_point() else cast(Tensor, self.embed_tokens(tokens))

    def cache_shape(self) -> CacheShape:
        return CacheShape.from_config(self.config, 1, self.weight, self.config.max_position_embeddings)

    def pass_model(self, logits: Callable[[Tensor], Tensor]) -> PassModel:
        """Return what computes passes; ``logits``: of the head's outputs."""
        embeddings = self.embed_tokens
        return PassModel(self, logits, self.config.hidden_size, True, self.reach,
                         embeddings if isinstance(embeddings, EmbeddingTable) else None,
                         "the host has to know which experts run" if self.layer.experts is not None else "")


def _prepare_below(module: nn.Module) -> None:
    for part in module.children():
        prepare = getattr(part, "prepare", None)
        if prepare is None:
            _prepare_below(part)
        else:
            prepare()


class HeadDrafter(TreeDrafter):
    """Rows pair a state with a token."""

    rows_behind = 1

    def __init__(self, head: DraftHead, logits: Callable[[Tensor], Tensor],
                 draft_vocabulary: DraftVocabulary | None = None, memory: CacheMemory | None = None,
                 recorded: RecordedPasses | None = None) -> None:
        self._head: DraftHead = head.eval().requires_grad_(False)
        head.prepare()
        self._states: list[Tensor] = []  # the queued text rows' states, [n, width] each, in order
        shape = head.cache_shape()
        self._dtype, self._device = shape.dtype, shape.device
        super().__init__(shape, head.pass_model(logits), draft_vocabulary, memory, recorded)

    def reset(self, sampling: Sampling, rank: Rank, tau: float) -> None:
        super().reset(sampling, rank, tau)
        self._states.clear()

    def _forget_rows(self, queued: int) -> None:
        super()._forget_rows(queued)
        self._states = [torch.cat(self._states)[:queued].clone()] if queued else []

    def _text_states(self, features: Tensor, rows: Sequence[int]) -> Tensor:
        """States [n, width] of the text rows that ``features`` and ``rows`` name; by default the features."""
        return features.to(self._device, self._dtype)

    def _to_head_input(self, states: Tensor) -> Tensor:
        """States [n, width] of text rows to the head's inputs [n, H]."""
        return states

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
        self._states.append(self._text_states(features, rows))
        self._queue.extend(tokens)
        self._text_length += len(tokens)

    def _inputs(self, rows: Rows) -> PassInputs:
        text, nodes, placed = rows.text, rows.nodes, rows.placed
        states: list[Tensor] = []
        if text:
            waiting = torch.cat(self._states)
            states.append(self._to_head_input(waiting[: len(text)]))
            self._states = [waiting[len(text) :]] if len(text) < len(waiting) else []
        states += [self._outputs[node.parent][None] for node in nodes]
        start = self._cache.committed - len(text)
        # Text rows stand at 0, 1, ...: row i holds token i + 1.  So a node's row is one below it.
        tokens = [*text, *(node.token for node in nodes)]
        positions = [*range(start, start + len(text)), *(node.position - 1 for node in nodes)]
        return PassInputs(tokens, positions, states, *placed)

    def shares_passes_with(self, other: Drafter) -> bool:
        return isinstance(other, HeadDrafter) and other._head is self._head
