"""Recurrent layers in a stage: multimodal checkpoints as they are published, shards of them, restarts, long
texts, snapshots; all against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.family_checkpoints import VOCAB, family_model
from kits.sharded_models import cut
from kits.stages import Book, Oracle, engines, random_tokens, through
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowspec_edge.errors import ProtocolError
from flowspec_edge.lab.plain import load_reference_model
from flowspec_edge.messages import Close, Open
from flowspec_edge.model.config import cache_values, load_config
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.engine import StageEngine
from flowspec_edge.stage.layers import recurrent
from flowspec_edge.stage.layers.recurrent import GatedDelta, RecurrentArena, RecurrentCache
from flowspec_edge.stage.layers.stage_cache import reusable
from flowspec_edge.stage.shard import load_lm_head, load_shard
from flowspec_edge.util.tensors import to_torch


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_model("qwen3.5", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_model("qwen3.5-moe", tmp_path_factory.mktemp("sparse"), hidden=64)


def published(plain: Path, out: Path) -> Path:
    """As Qwen publishes a model: inside a multimodal one, experts stacked, beside what drafts and sees."""
    out.mkdir()
    (out / "tokenizer.json").write_text("{}")
    config = json.loads((plain / "config.json").read_text())
    kind = config["model_type"].removesuffix("_text")
    (out / "config.json").write_text(json.dumps({
        "model_type": kind, "tie_word_embeddings": config["tie_word_embeddings"], "text_config": config,
        "vision_config": {"model_type": f"{kind}_vision", "depth": 1}}))
    found = {name.replace("model.language_model.", "model."): tensor
             for name, tensor in load_file(plain / "model.safetensors").items()}
    stored: dict[str, Tensor] = {"mtp.norm.weight": torch.zeros(4), "model.visual.norm.bias": torch.zeros(3)}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}.mlp.experts"
        each = [[found.pop(f"{block}.{i}.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")]
                for i in range(config.get("num_experts") or 0)]
        if each:
            within = block.replace("model.", "model.language_model.", 1)
            stored[f"{within}.gate_up_proj"] = torch.stack([torch.cat(one[:2]) for one in each])
            stored[f"{within}.down_proj"] = torch.stack([one[2] for one in each])
    save_file(stored | {name.replace("model.", "model.language_model.", 1): tensor
                        for name, tensor in found.items()}, out / "model.safetensors")
    return out


def logits(model: Path, text: list[int], stages: int = 2) -> Tensor:
    """Of a whole text [n, V]."""
    home = model / "draft" / "target" if (model / "draft").is_dir() else model
    hidden = to_torch(through(engines(model, stages), Book().text(text))[1].hidden)
    return hidden @ load_lm_head(home, "fp32").mT


def test_a_published_multimodal_checkpoint(sparse: Path, tmp_path: Path) -> None:
    """The same rows as the language model alone, which transformers computes."""
    model, text = published(sparse, tmp_path / "whole"), random_tokens(40, VOCAB, seed=1)
    assert load_config(model).model_type == "qwen3_5_moe_text"
    assert (OpenModel(model).layers, cache_values(OpenModel(model).config)) == (4, 2 * 2 * 16)
    with torch.inference_mode():
        exact = Oracle(sparse).model(torch.tensor([text])).logits[0]
        own = load_reference_model(model, "fp32")(torch.tensor([text])).logits[0]
    torch.testing.assert_close(logits(model, text), exact, atol=5e-4, rtol=0)
    torch.testing.assert_close(own, exact, atol=5e-4, rtol=0)


def test_shards_of_it_in_4_bits(sparse: Path, tmp_path: Path) -> None:
    """As transformers computes the same matrices; small ones that make decays and gates stay as they are."""
    cut(published(sparse, tmp_path / "whole"), tmp_path / "out", dtype="int4", stages=2)
    text = random_tokens(24, VOCAB, seed=2)
    with torch.inference_mode():
        exact = load_reference_model(tmp_path / "out", "fp32")(torch.tensor([text])).logits[0]
    torch.testing.assert_close(logits(tmp_path / "out", text), exact, atol=5e-4, rtol=0)
    plain: Any = load_shard(tmp_path / "out", 0, 2, "fp32").modules[0].linear_attn
    assert isinstance(plain.in_proj_ba, torch.nn.Linear)
    assert not isinstance(plain.in_proj_qkvz, torch.nn.Linear)


def test_the_manifest_counts_what_a_request_holds(sparse: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """A session with a long text and 240 rows in flight beside a retained text, which keeps two snapshots of
    the grid and one near the prompt's end."""
    monkeypatch.setattr(recurrent, "GRID", 32)
    whole = published(sparse, tmp_path / "whole")
    part = cut(whole, tmp_path / "out", dtype="int4", stages=1).part("stage-1")
    [engine] = engines(tmp_path / "out", 1, "bf16", capacity=512)
    kinds = [kind for kind in engine.model.kinds if isinstance(kind, GatedDelta)]
    states, entries = sum(kind.state_bytes(2) for kind in kinds), sum(kind.entry_bytes(2) for kind in kinds)
    text = random_tokens(100, VOCAB, seed=6)
    for session in (1, 2):
        engine.open(Open(session, 1, 512, retained=(1,), snapshot=84))
        book = Book(session, epoch=1)
        for start in (0, 50):
            through([engine], book.text(text[start : start + 50]))
        if session == 1:
            engine.close(Close(1, tuple(range(100))))
            unfolded = 84 % recurrent.BLOCK * entries
            assert (state_memory(engine) - unfolded) // states == 3
    below = book.committed[-1]
    for start in range(0, 240, 16):
        leaves = [book.add(token, below) for token in random_tokens(16, VOCAB, seed=start)]
        through([engine], book.builder.seal())
        below = leaves[-1]
    assert part.states * 0.8 <= state_memory(engine) <= part.states
    assert part.cache_bytes(1000, 2) == 1000 * part.row_bytes + 2 * part.states


def state_memory(engine: StageEngine) -> int:
    return sum(arena.nbytes for arena in engine._memory.arenas.values() if isinstance(arena, RecurrentArena))


def test_a_text_that_begins_at_a_snapshot(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the text, and a session that shares its beginning goes on from a snapshot."""
    monkeypatch.setattr(recurrent, "GRID", 32)
    oracle, chain = Oracle(dense), engines(dense, 2, capacity=200)
    text, book = random_tokens(75, VOCAB, seed=4), Book()
    for rows in (30, 3, 1, 25, 16):
        through(chain, book.text(text[len(book.committed) : len(book.committed) + rows]))
        for part in engine_parts(chain[0]):
            assert len(part) <= 2 * recurrent.BLOCK
    other = [*text[:70], *random_tokens(20, VOCAB, seed=5)]
    kinds = chain[0].model.kinds
    assert [reusable(kinds, 75, rows) for rows in (75, 70, 64, 63, 32, 31)] == [64, 64, 64, 32, 32, 0]
    for engine in chain:
        engine.close(Close(1, tuple(book.committed)))
        engine.open(Open(2, 0, 200, parent_session=1, rows=64))
    after = to_torch(through(chain, Book(2, kept=tuple(text[:64])).text(other[64:]))[1].hidden)
    torch.testing.assert_close(after, oracle.forward(other)[64:], atol=5e-4, rtol=0)
    for engine in chain:
        engine.close(Close(2, tuple(range(80))))
        with pytest.raises(ProtocolError, match=r"begin with 65 rows .* kept the states after .32, 64."):
            engine.open(Open(3, 0, 200, parent_session=2, rows=65))


def engine_parts(engine: StageEngine) -> list[RecurrentCache]:
    cache = engine.cache_of(1)
    assert cache is not None
    return [part for part in cache.parts if isinstance(part, RecurrentCache)]
