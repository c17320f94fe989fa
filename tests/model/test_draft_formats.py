"""Formats of heads by their config.json: recognised, and refused by name where a draft model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flowspec_edge.drafting.load import load_drafters
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.catalogue import known_models
from flowspec_edge.model.draft_kinds import FORMATS, kind_of_format, recognise_format
from flowspec_edge.sharding.drafts import open_draft

# Fields of config.json files as their publishers' code writes them.
CONFIGS = [
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 5}}, "DFlash"),
    ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256, "target_layer_ids": [1, 9]}, "DSpark"),
    ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "target_layer_ids": [1, 9]}, "DFlash"),
    ({"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}}, "DSpark"),
    ({"architectures": ["DominoDraftModel"], "dflash_config": {"projector_type": "domino"}}, "Domino"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"causal_head": True}}, "JetSpec"),
    ({"speculators_model_type": "dflash", "transformer_layer_config": {}}, "DFlash"),
    ({"speculators_model_type": "dflash2"}, "DFlash2"),
    ({"architectures": ["Qwen3DFlash2DraftModel"], "dflash_config": {"mask_token_id": 5}}, "DFlash2"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"selector_rank": 256}}, "DFlash2"),
    ({"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}, "P-EAGLE"),
    ({"architectures": ["PEagleDraftModel"], "model_type": "llama"}, "P-EAGLE"),
    ({"speculators_model_type": "mlp"}, "speculators' mlp"),
    ({"medusa_num_heads": 4, "medusa_num_layers": 1}, "Medusa"),
    ({"hydra_num_heads": 4}, "Hydra"),
    ({"model_type": "gemma4_assistant"}, "Gemma 4 assistant"),
    ({"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}, "EAGLE-3"),
    ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, None),
    ({"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 9, 17, 25, 33]}, None),
    ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, None),
]


@pytest.mark.parametrize(("config", "name"), CONFIGS)
def test_a_config_names_its_format(config: dict[str, object], name: str | None) -> None:
    assert recognise_format(config) == name


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "spd"])
@pytest.mark.parametrize(("config", "name"), [
    case for case in CONFIGS if case[1] is not None and kind_of_format(case[1]) is None][:6])
def test_other_formats_are_refused_wherever_they_lie(tmp_path: Path, kind: str, config: dict[str, object],
                                                     name: str) -> None:
    for place in ("eagle2", "eagle3", "spd"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps(config))
    for read in (lambda: open_draft(tmp_path / "eagle3"),
                 lambda: load_drafters(kind, tmp_path, torch.zeros(9, 4), torch.zeros(9, 4), "fp32", 8)):
        with pytest.raises(FlowspecError, match=f"in the format {name} cannot be run") as caught:
            read()
        assert "flowspec models head MODEL" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "spd"])
def test_a_block_drafter_elsewhere_is_told_its_place(tmp_path: Path, kind: str) -> None:
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "config.json").write_text(json.dumps(CONFIGS[1][0]))
    with pytest.raises(FlowspecError, match=r"of the kind dspark .*: name it .*/dspark$"):
        load_drafters(kind, tmp_path, torch.zeros(9, 4), torch.zeros(9, 4), "fp32", 8)


@pytest.mark.parametrize("field", [
    {"speculators_config": {"verifier": {"name_or_path": "Qwen/Qwen3-8B"}}},
    {"target_model_name_or_path": "Qwen/Qwen3-8B"},
])
def test_a_refusal_says_which_heads_there_are(tmp_path: Path, field: dict[str, object]) -> None:
    config = {"speculators_model_type": "peagle", **field}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlowspecError) as caught:
        open_draft(tmp_path)
    assert "AngelSlim/Qwen3-8B_eagle3" in str(caught.value)
    assert "RedHatAI/Qwen3-8B-speculator.dflash2" in str(caught.value)
    assert "Qwen3-8B-speculator.peagle" not in str(caught.value)


def test_heads_of_the_catalogue_have_a_format_and_a_source() -> None:
    heads = [head for model in known_models().values() for head in model.published]
    assert {head.format for head in heads} <= set(FORMATS)
    assert all(head.source for head in heads if head.acceptance)
    assert len({head.repository for head in heads}) == len(heads)
