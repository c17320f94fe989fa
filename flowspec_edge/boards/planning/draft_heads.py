"""What each kind of draft head takes on D0: memory, and the time of a pass, by bytes over bandwidth.

Sizes are those of the usual head of a kind for a target's shape: EAGLE's one layer, a block drafter's five
over five of the target's states, with blocks of 16 and a Markov head of rank 256; and of the MTP layer of a
family that has one.  EAGLE-3's own lm_head is over 32,000 tokens; the others rank by the target's, which D0
holds anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from flowspec_edge.boards.planning.model_size import assumed_head, head_bytes, module_bytes, unread_experts
from flowspec_edge.boards.planning.planned_draft import DEPTHS
from flowspec_edge.boards.planning.scaling import weight_read_ms
from flowspec_edge.device_profile import Profile
from flowspec_edge.model.draft_kinds import head_kinds
from flowspec_edge.model.families import family_of
from flowspec_edge.model.manifest import HeadBits
from flowspec_edge.stage.quant.schemes import draft_scheme, head_scheme

_WIDTH = 2  # bytes of an unpacked value


@dataclass(frozen=True)
class HeadCost:
    """kind       of draft model
    bits       of its matrices and of lm_head
    memory_mb  10^6 bytes of the head and the target's lm_head, without caches; embeddings stay in their file
    fits       beside D0's process in the board's memory
    pass_ms    to read what a pass needs
    tree_ms    for a tree of eight depths: as many passes, but one of a block drafter
    """

    kind: str
    bits: HeadBits
    memory_mb: float
    fits: bool
    pass_ms: float
    tree_ms: float


def head_costs(config: Any, profile: Profile) -> list[HeadCost]:
    """For a target of transformers' ``config``, on a D0 of ``profile``, scaled to a model or not."""
    kinds = (*head_kinds(), *family_of(config).draft_layers)
    lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
    room = profile.memory.usable_mb - profile.memory.process_mb if profile.memory else float("inf")
    found = []
    for kind in kinds:
        head = assumed_head(config, kind)
        for bits in get_args(HeadBits):
            scheme, rate = draft_scheme(bits), weight_read_ms(profile, bits) / 1e6
            looked_up = [part for part in head.modules() if isinstance(part, nn.Embedding)]
            own = module_bytes(head, _WIDTH, scheme)
            read = (own - sum(part.weight.numel() * _WIDTH for part in looked_up)
                    - unread_experts(head, _WIDTH, scheme))
            matrix = module_bytes(lm_head, _WIDTH, head_scheme(bits))
            memory = (head_bytes(head, _WIDTH, scheme) + matrix) / 1e6
            passed = (read + (0 if getattr(head, "lm_head", None) is not None else matrix)) * rate
            found.append(HeadCost(kind.name, bits, memory, memory <= room, passed,
                                  passed * (1 if kind.is_block else DEPTHS)))
    return found

