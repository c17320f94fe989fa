"""SPD's kind of draft model: the speculation module, which foresees a token from the states in the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowspec_edge.model.draft_kind import DraftKind, Shapes


def _is_module(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return isinstance(config.get("target_layers"), int) and "d2t" not in shapes


KIND = DraftKind("spd", "spd", "SPD module", "flowspec_edge.lab.spd.drafter", (0, 38), recognise=_is_module,
                 is_head=False, looks_up_target=True, bound=True, shares_memory=False, charged_as="spd_pass_ms",
                 layers=2, made_by="flowspec models train-spd", measured_by=("spd",))
