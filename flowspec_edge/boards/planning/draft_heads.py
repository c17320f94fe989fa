"""What each kind of draft head takes on D0: memory, and the time of a pass, by bytes over bandwidth.

Sizes are those of the usual head of a kind for a target's shape: EAGLE's one layer, a block drafter's five
over five of the target's states, with blocks of 16 and a Markov head of rank 256; and of the MTP layer of a
family that has one.  EAGLE-3's own lm_head is over 32,000 tokens; the others rank by the target's, which D0
holds anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from flowspec_edge.boards.planning.model_size import ranking_bytes, usual_heads_of
from flowspec_edge.boards.planning.planned_draft import DEPTHS
from flowspec_edge.boards.planning.scaling import weight_read_ms
from flowspec_edge.device_profile import Profile
from flowspec_edge.model.draft_kinds import DRAFT_KINDS
from flowspec_edge.model.manifest import HeadBits
from flowspec_edge.stage.quant.sizes import draft_bits, matrix_bytes, packed_as
from flowspec_edge.util.jetson import process_memory

_WIDTH = 2  # bytes of an unpacked value


@dataclass(frozen=True)
class HeadCost:
    """What a usual draft head costs on D0.

    kind       the kind of draft model
    bits       bits of its matrices and of lm_head
    memory_mb  10^6 bytes of the head and the target's lm_head, without caches; embeddings stay in their file
    fits       whether it fits into the board's memory beside D0's process
    pass_ms    time to read what a pass needs
    tree_ms    time of a tree of eight depths: eight passes, or one of a block drafter
    """

    kind: str
    bits: HeadBits
    memory_mb: float
    fits: bool
    pass_ms: float
    tree_ms: float


def head_costs(name_or_path: str, profile: Profile) -> list[HeadCost]:
    """Return what each usual draft head of a model costs on a D0 of ``profile``.

    The model is given by name or directory, as for ``model_size.model_bytes``; the profile may be scaled to a model
    or not.
    """
    hidden, vocabulary, heads = usual_heads_of(name_or_path)
    memory = profile.memory
    room = memory.usable_mb - memory.process_mb - process_memory().d0 if memory else float("inf")
    costs = []
    for name, head in heads.items():
        kind = DRAFT_KINDS[name]
        for bits in get_args(HeadBits):
            packed, rate = packed_as(draft_bits(bits)), weight_read_ms(profile, bits) / 1e6
            head_bytes = head.part.nbytes(_WIDTH, packed)
            matrix = matrix_bytes(vocabulary, hidden, _WIDTH, packed_as(bits))
            beside, ranked, _ = ranking_bytes(kind, head, vocabulary, hidden, _WIDTH, bits)
            head_mb = (head_bytes + beside + matrix) / 1e6
            read_bytes = head_bytes + beside - head.looked_up * _WIDTH - head.unread(_WIDTH, packed)
            pass_ms = (read_bytes + ranked) * rate
            costs.append(HeadCost(name, bits, head_mb, head_mb <= room, pass_ms,
                                  pass_ms * (1 if kind.is_block else DEPTHS)))
    return costs
