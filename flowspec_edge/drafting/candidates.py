"""The candidate head: ranks a row's children without reading the whole lm_head.

Logits of low rank, up(down(h)), find each row's likeliest tokens, its candidates; these get their logits from
lm_head's own rows.  The other tokens keep the low-rank logits, moved by the candidates' mean error, and never above
the least candidate.  So the best children are always candidates with exact logits; the log-probabilities are those of
a softmax whose tail is estimated; and noise (``rank="noise"``) can still choose a token of the tail.  A draft's scores
order the tree and no more: the target's tokens always come from the whole lm_head.

EAGLE-4 heads bring the factor (``eagle.eagle3``).  For other heads :func:`narrowed` makes it when the head is loaded:
``down`` projects on the principal components of the states that the head itself produces, and ``up`` is lm_head on
these.  Tokens and states of that are the head's own: it feeds itself from nothing, and its tokens are drawn from its
logits.  (The truncated SVD of lm_head alone, which knows no states, finds a quarter of the best ten.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from flowspec_edge.model.candidates import Candidates
from flowspec_edge.model.output_head import MatrixRows, OutputHead
from flowspec_edge.sampling.sampler import device_words, gumbel_from, largest
from flowspec_edge.util.weight_file import tokens_device

_SEQUENCES, _STEPS = 32, 34  # of the head's own text
_UNLIKE = 2  # first steps of each sequence, which begins from nothing: their states are left out
_ROWS = 64  # of lm_head's products


class CandidateHead(nn.Module):
    """States [..., H] to logits [..., V], as the module's docstring says.

    ``rank`` and ``count`` as in ``model.candidates``.
    """

    def __init__(self, exact: OutputHead, down: nn.Module, up: nn.Module, count: int) -> None:
        """Rank by ``down`` and ``up`` first, then by ``exact``, the whole matrix.

        ``down`` maps [..., H] to [..., rank], ``up`` maps that to [..., V].
        """
        super().__init__()
        self._exact = [exact]  # not a part of this module, which may be moved or counted
        self.down, self.up, self.count = down, up, min(count, exact.vocabulary)

    def forward(self, states: Tensor) -> Tensor:
        flat = states.flatten(0, -2)
        low: Tensor = self.up(self.down(flat))
        low_logits, ids = largest(low, self.count)
        scored = self._exact[0].logits_at(flat, ids)
        moved = low + (scored - low_logits).mean(-1, keepdim=True)
        logits = torch.minimum(moved, scored.amin(-1, keepdim=True)).scatter_(-1, ids, scored)
        return logits.view(*states.shape[:-1], -1)


@torch.inference_mode()
def narrowed(head: Any, rank_states: Callable[[Tensor, nn.Module], Tensor], lm_head: OutputHead, how: Candidates,
             quantise: Callable[[nn.Module], None]) -> CandidateHead:
    """Make the candidate head of a draft head that is prepared, on ``lm_head``'s device.

    rank_states  the head's outputs [..., H], and what ranks in the place of lm_head, to logits [..., V]
    quantise     replaces linears in a module
    """
    base = principal(sample_states(head, rank_states, lm_head), how.rank).to(lm_head.device, lm_head.dtype)
    up = nn.Linear(how.rank, lm_head.vocabulary, bias=False, device="meta")
    up.weight = nn.Parameter(torch.cat([lm_head(rows) for rows in base.split(_ROWS)]).t().contiguous(),
                             requires_grad=False)
    candidate_head = CandidateHead(lm_head, MatrixRows(base), up, how.count)
    quantise(candidate_head)
    return candidate_head


class _Watched(nn.Module):
    def __init__(self, lm_head: OutputHead) -> None:
        super().__init__()
        self._lm_head, self.states = lm_head, list[Tensor]()

    def forward(self, states: Tensor) -> Tensor:
        self.states.append(states.flatten(0, -2))
        return cast(Tensor, self._lm_head(states))


def sample_states(head: Any, rank_states: Callable[[Tensor, nn.Module], Tensor], lm_head: OutputHead) -> Tensor:
    """States [n, H] that lm_head reads while the head continues its own text."""
    device, watched, shape = lm_head.device, _Watched(lm_head), head.cache_shape()
    cache = shape.arena(_SEQUENCES * _STEPS).take(_SEQUENCES * _STEPS)
    states = torch.zeros(_SEQUENCES, head.config.hidden_size, dtype=lm_head.dtype, device=device)
    tokens = torch.randint(lm_head.vocabulary, (_SEQUENCES,), generator=torch.Generator().manual_seed(0)).to(device)
    for step in range(_STEPS):
        positions = torch.full((_SEQUENCES,), step, device=device)
        rows = np.arange(_SEQUENCES) + _SEQUENCES * step
        visible = np.tile(np.eye(_SEQUENCES, dtype=bool), step + 1)
        token_ids = tokens.to(tokens_device(head.embed_tokens, device))
        states = head(states, token_ids, positions, shape.mask(visible), cache)
        cache.append(_SEQUENCES)
        noise = gumbel_from(device_words(0, rows, lm_head.vocabulary, device), torch.float32)
        tokens = (rank_states(states, watched) + noise).argmax(-1)
    return torch.cat(watched.states[_UNLIKE:])


def principal(states: Tensor, rank: int) -> Tensor:
    """Orthonormal rows [rank, H] that span the states' first principal components, the mean not taken off."""
    x = states.to("cpu", torch.float64)
    _, vectors = torch.linalg.eigh(x @ x.T)  # fewer states than values in one
    return torch.linalg.qr(x.T @ vectors[:, -rank:])[0].T.contiguous()
