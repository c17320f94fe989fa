"""Formats of published draft heads: their names, and how a head's config.json shows which one it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Format -> kind of draft model; None: cannot be run.  An MTP layer is read from its model's checkpoint alone.
FORMATS: dict[str, str | None] = {
    "EAGLE-2": "eagle2", "EAGLE-3": "eagle3", "DFlash": "dflash", "DFlash2": "dflash", "DSpark": "dspark",
    "JetSpec": "dflash", "Domino": None, "P-EAGLE": None, "MTP": "mtp", "Medusa": None, "Hydra": None,
    "Gemma 4 assistant": None,
}
# ``speculators_model_type`` of vllm-project/speculators, and ``projector_type`` of SpecForge.
_TYPES = {"eagle": "EAGLE-2", "eagle3": "EAGLE-3", "dflash": "DFlash", "dflash2": "DFlash2",
          "dspark": "DSpark", "domino": "Domino", "peagle": "P-EAGLE", "mtp": "MTP"}
# Parts of names in ``architectures``, the first that fits; those of EAGLE heads are not listed.
_ARCHITECTURES = {"dflash2": "DFlash2", "dflash": "DFlash", "dspark": "DSpark", "jetspec": "JetSpec",
                  "domino": "Domino", "peagle": "P-EAGLE", "medusa": "Medusa", "hydra": "Hydra",
                  "mtpdraft": "MTP", "gemma4assistant": "Gemma 4 assistant"}


def recognise_format(config: Mapping[str, Any]) -> str | None:
    """The format that a config.json names; None if it names none, as EAGLE heads and language models."""
    return next(_named(config), None)


def _named(config: Mapping[str, Any]) -> Iterator[str]:
    block = config.get("dflash_config")
    block = block if isinstance(block, dict) else {}
    if (given := config.get("speculators_model_type")) is not None:
        yield _TYPES.get(str(given), f"speculators' {given}")
    if (given := block.get("projector_type")) is not None:
        yield _TYPES.get(str(given), f"DFlash with {given}")
    if block.get("selector_rank"):
        yield "DFlash2"
    if block.get("causal_head"):
        yield "JetSpec"
    if config.get("markov_rank") == 0:  # DeepSpec's class for both
        yield "DFlash"
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        plain = str(name).lower()
        yield from (known for part, known in _ARCHITECTURES.items() if part in plain)
    if block:
        yield "DFlash"
    for field, known in (("markov_rank", "DSpark"), ("medusa_num_heads", "Medusa"),
                         ("hydra_num_heads", "Hydra")):
        if field in config:
            yield known
    if str(config.get("model_type", "")).startswith("gemma4_assistant"):
        yield "Gemma 4 assistant"
