"""The parts of a model: shapes, from which ``model_size`` computes bytes in any element type; without torch.

``read_parts`` finds them through modules on the meta device, which takes seconds.  The shapes of the catalogue's models
are therefore kept in ``models/parts.json``, which ``python -m flowspec_edge.boards.planning.read_parts`` writes; a test
compares them with what is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated

from pydantic import Field

from flowspec_edge.model.expert_counts import correlated
from flowspec_edge.model.manifest import CacheBits, HeadBits
from flowspec_edge.stage.quant.sizes import DEFAULT_GROUP, Packed, matrix_bytes, packed_as, rescored_bytes
from flowspec_edge.strategies.tree_strategy import TreeParameters
from flowspec_edge.util.bounded_read import read_bytes
from flowspec_edge.util.resources import resource_dir
from flowspec_edge.util.tomlfile import StrictModel

FILE = "parts.json"  # in models/
Number = Annotated[int, Field(ge=0)]


class Matrices(StrictModel):
    """Several matrices of one shape, ``count`` of them, that may be quantised.

    stored  as a GGUF file has them: in 4 or 8 bits, or "16bit"; None: as the plan says
    """

    rows: Number
    columns: Number
    count: Number = 1
    stored: HeadBits | None = None

    def nbytes(self, width: int, packed: Packed | None, group: int = DEFAULT_GROUP) -> int:
        """Return the bytes of all parts, at ``width`` bytes a value or ``packed``."""
        packing = packed if self.stored is None else packed_as(self.stored)
        # Of a GGUF file only blocks of 4 bits keep their groups.
        return self.count * matrix_bytes(self.rows, self.columns, width, packing,
                                         DEFAULT_GROUP if self.stored == "int8" else group)


class PartShape(StrictModel):
    """A layer, an expert or a head: ``kept`` values that are never quantised, and matrices."""

    kept: Number
    matrices: list[Matrices]

    @property
    def values(self) -> int:
        return self.kept + sum(m.rows * m.columns * m.count for m in self.matrices)

    def nbytes(self, width: int, packed: Packed | None, group: int = DEFAULT_GROUP) -> int:
        return self.kept * width + sum(m.nbytes(width, packed, group) for m in self.matrices)


class ExpertsShape(StrictModel):
    """The experts of a layer, ``count`` of one ``expert``, of which a row chooses ``chosen``."""

    count: Number
    chosen: Number
    expert: PartShape


class HeadShape(StrictModel):
    """A draft model on D0.

    part         without the embeddings of tokens, which stay in their file
    looked_up    values of ``part`` of which a pass reads few rows
    own_lm_head  it ranks by a matrix of its own, which is in ``part``
    drafted      tokens that it ranks by the target's matrix
    kv_row       values of one row's keys and values, in all of its layers
    experts      of each of its mixtures
    rescored     its own lm_head, if a candidate head stands for it (EAGLE-4): a pass reads ``candidates`` rows of it
                 for a node
    """

    part: PartShape
    own_lm_head: bool
    drafted: Number
    kv_row: Number
    looked_up: Number = 0
    experts: list[ExpertsShape] = Field(default_factory=list)
    rescored: Matrices | None = None
    candidates: Number = 0

    def unread(self, width: int, packed: Packed | None) -> float:
        """Return the bytes that a pass does not read.

        They are of an lm_head, and of the experts that no row of a level of the default tree chooses on average, if
        rows choose independently.
        """
        lm_head = self.rescored
        head_bytes = 0 if lm_head is None else max(0, lm_head.nbytes(width, packed) - rescored_bytes(
            TreeParameters().width * self.candidates, lm_head.rows, lm_head.columns, width, packed))
        return head_bytes + sum((e.count - correlated(e.count, e.chosen, TreeParameters().width, 0.0))
                   * e.expert.nbytes(width, packed) for e in self.experts)


class CacheBytes(StrictModel):
    """Averages over all layers, in bytes, for one way to keep keys and values and one width of a value.

    window      rows that layers with a window see; ``windowed``: their share of all layers
    state       of recurrent layers, for a request; ``state_read``: what a pass reads of it
    """

    kv_row: Number
    window: int | None
    windowed: float
    state: Number
    state_read: Number


class ModelParts(StrictModel):
    """The shapes of a model's parts.

    layers   the distinct ones
    group    of int4, in a GGUF file
    drafts   by kind
    caches   by "16bit" or "int8", then by the width of a value in bytes
    queries  values of a row's queries in layers that see the whole text, as an average over all layers
    """

    family: str
    count: Number  # of layers
    layers: list[PartShape]
    norm: Number
    hidden: Number
    vocabulary: Number
    max_positions: Number
    experts: ExpertsShape | None
    drafts: dict[str, HeadShape]
    caches: dict[CacheBits, dict[str, CacheBytes]]
    group: Number = DEFAULT_GROUP
    from_weights: bool = False
    queries: Number = 0


class ShippedParts(StrictModel):
    models: dict[str, ModelParts]


@cache
def shipped_parts() -> Mapping[str, ModelParts]:
    """Return the parts of the catalogue's models, by name."""
    path = resource_dir("models") / FILE
    return ShippedParts.model_validate_json(read_bytes(path)).models
