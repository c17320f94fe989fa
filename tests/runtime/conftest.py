"""Models for the runtime's tests: tiny random ones, and the demonstration model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_llama
from transformers import LlamaConfig

from flowspec_edge.drafting.eagle import EagleHead
from flowspec_edge.drafting.eagle_checkpoint import save_head
from flowspec_edge.modeldir import resolve_model


def tiny_head(path: Path, vocab: int, hidden: int = 64, seed: int = 1) -> None:
    """A random EAGLE-2 head in the published format."""
    config = LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden,
                         num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, bias=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        save_head(EagleHead(config), path, torch.float32)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, 97 tokens, a random head that is right now and then."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(path / "target", layers=8, vocab=97)
    tiny_head(path / "eagle2", vocab=97)
    return path


@pytest.fixture(scope="session")
def small_vocabulary_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers and 8 tokens: small enough to count how often each text comes."""
    path = tmp_path_factory.mktemp("small")
    tiny_llama(path / "target", layers=2, hidden=32, vocab=8)
    tiny_head(path / "eagle2", vocab=8, hidden=32)
    return path


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return resolve_model("demo").path
