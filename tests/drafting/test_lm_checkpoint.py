"""Draft models of many families, their vocabularies, and what is refused: against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.stages import RECURRENT
from kits.tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from flowspec_edge.drafting.lm import LMDrafter, load_lm
from flowspec_edge.errors import FlowspecError
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest

CPU = torch.device("cpu")
V = 67
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 4},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": {"sliding_window": None},
    "gemma3_text": {"tie_word_embeddings": True},
    "phi3": {},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
}


def write(path: Path, family: str = "llama", vocab: int = V, **extra: Any) -> Path:
    return tiny_model(family, path, layers=2, hidden=32, vocab=vocab, **extra)


def agrees(drafter: LMDrafter, path: Path, vocabulary: int, text: list[int]) -> None:
    """Root, children, grandchild: as the model's own pass over each path, among the shared tokens."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    drafter.reset(Sampling(), "draft", 1.0)
    drafter.commit(text[:1], None)
    drafter.commit(text[1:], None)
    root = DraftNode(0, -1, text[-1], len(text) - 1)
    a, b = DraftNode(1, 0, 11, len(text)), DraftNode(2, 0, 12, len(text))
    c = DraftNode(3, 2, 13, len(text) + 1)
    for nodes, below in (((root,), [[]]), ((a, b), [[11], [12]]), ((c,), [[12, 13]])):
        got = drafter.expand(DraftRequest(0, nodes, vocabulary))
        for row, tokens in enumerate(below):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([text + tokens])).logits[0, -1, :vocabulary]
            want = torch.log_softmax(logits, -1).numpy()
            np.testing.assert_allclose(got.scores[row], want[got.tokens[row]], atol=1e-4)
            assert sorted(got.tokens[row].tolist()) == list(range(len(want)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_that_stages_run(tmp_path: Path, family: str) -> None:
    write(tmp_path, family, **FAMILIES[family])
    agrees(load_lm(tmp_path, tmp_path, V, torch.float32, CPU), tmp_path, V, [5, 6, 7, 8, 9, 3, 4, 60, 2])


@pytest.mark.parametrize("shape", [{"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 4},
                                   {"num_key_value_heads": 1}, {"head_dim": 16}, {"hidden_act": "gelu"}])
def test_llamas_of_all_shapes(tmp_path: Path, shape: dict[str, Any]) -> None:
    write(tmp_path, **shape)
    agrees(load_lm(tmp_path, tmp_path, V, torch.float32, CPU), tmp_path, V, [5, 6, 7, 8, 9, 3])


@pytest.mark.parametrize(("family", "extra", "why"), [
    ("mamba", {}, "mamba"), ("gemma2", {}, "gemma2"),
    ("qwen3_5_text", RECURRENT | {"layer_types": ["linear_attention", "full_attention"]}, "cannot draft trees"),
])
def test_families_that_cannot_draft_trees_are_refused(tmp_path: Path, family: str, extra: dict[str, Any],
                                                      why: str) -> None:
    """Those that stages do not run, and those with a recurrence."""
    write(tmp_path, family, **extra)
    with pytest.raises(FlowspecError, match=why) as caught:
        load_lm(tmp_path, tmp_path, V, torch.float32, CPU)
    assert "\n" not in str(caught.value)


def padded(path: Path, vocab: int, tokenizer: PreTrainedTokenizerFast | None) -> Path:
    """A model whose vocabulary is larger than its tokenizer's."""
    write(path, vocab=vocab)
    for file in path.glob("tokenizer*"):
        file.unlink()
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(("own", "target"), [(128, 112), (112, 128), (112, 112)])
def test_a_vocabulary_that_is_padded_otherwise_is_the_same(tmp_path: Path, own: int, target: int) -> None:
    """No id beyond the other's is drafted, and one that a random target makes up does no harm."""
    tokenizer = tiny_tokenizer(100)
    draft = padded(tmp_path / "draft", own, tokenizer)
    padded(tmp_path / "target", target, tokenizer)
    drafter = load_lm(draft, tmp_path / "target", target, torch.float32, CPU)
    agrees(drafter, draft, min(own, target), [5, 6, 7, 99])
    drafter.commit([target - 1], None)
    got = drafter.expand(DraftRequest(9, (DraftNode(9, -1, target - 1, 4),), own + target))
    assert sorted(got.tokens[0].tolist()) == list(range(min(own, target)))


def test_a_real_difference_is_refused_with_both_numbers(tmp_path: Path) -> None:
    def error(draft: PreTrainedTokenizerFast | None, target: PreTrainedTokenizerFast | None) -> str:
        number = len(list(tmp_path.iterdir()))
        paths = [tmp_path / f"{part}{number}" for part in ("draft", "target")]
        for path, vocab, tokenizer in zip(paths, (128, 112), (draft, target), strict=True):
            padded(path, vocab, tokenizer)
        with pytest.raises(FlowspecError) as caught:
            load_lm(*paths, 112, torch.float32, CPU)
        said = str(caught.value)
        assert "the draft model's vocabulary has 128 tokens, the target's 112" in said
        assert "\n" not in said
        return said

    small, large = tiny_tokenizer(100), tiny_tokenizer(120)
    other = tiny_tokenizer(98)
    other.add_tokens(["something"])
    assert "token 119 (" in error(large, small)
    assert "is unknown to the other" in error(large, small)
    assert "token 98 is 'something' here and" in error(other, small)
    assert "it cannot be told whether they do" in error(None, small)
    assert "it cannot be told whether they do" in error(small, None)
