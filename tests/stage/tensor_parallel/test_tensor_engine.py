"""Tensor-parallel ranks compute what transformers' unsharded model computes.

Each rank is a thread of its own with a real gloo group over loopback; the oracle is transformers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from kits.stages import Book, Oracle, assert_rows, random_tokens
from kits.tensor_parallel import KINDS, Ranks
from kits.tiny_models import tiny_model
from safetensors.torch import load_file, save_file

from flowspec_edge.errors import FlowspecError, ProtocolError
from flowspec_edge.messages import Cancel, Close, Open
from flowspec_edge.stage.shard import load_lm_head
from flowspec_edge.stage.tensor_parallel.layout import TensorKind
from flowspec_edge.stage.tensor_parallel.process_group import GlooGroup
from flowspec_edge.stage.tensor_parallel.shard import load_tensor_shard
from flowspec_edge.util.tensors import to_torch

VOCAB = 97
TEXT = random_tokens(17, VOCAB, seed=1)
FAMILIES = [
    ("mistral", {"sliding_window": None}), ("qwen2", {}), ("qwen3", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 6}), ("llama", {"num_key_value_heads": 1}),
]


def uneven(path: Path, family: str = "llama", **extra: object) -> Path:
    """Six query heads, two key/value heads, an MLP of 100: most counts of ranks divide none of them."""
    tiny_model(family, path, layers=2, hidden=48, heads=6, vocab=VOCAB,
               **{"intermediate_size": 100, **extra})
    file = path / "model.safetensors"
    noise = torch.Generator().manual_seed(3)  # transformers starts with biases of zero, norms of one
    save_file({name: torch.randn(t.shape, generator=noise) if name.endswith(("bias", "norm.weight")) else t
               for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uneven(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


def grow(book: Book, nodes: int, seed: int) -> list[int]:
    """A random tree of ``nodes`` rows below the newest committed one."""
    rng = np.random.default_rng(seed)
    tree = book.committed[-1:]
    for _ in range(nodes):
        tree.append(book.add(int(rng.integers(1, VOCAB)), int(rng.choice(tree))))
    return tree[1:]


def check(ranks: Ranks, book: Book, oracle: Oracle, sizes: tuple[int, ...], atol: float = 1e-4) -> None:
    """A prompt in two chunks, then trees over several commits; rows rarely divide among the ranks."""
    for chunk in (TEXT[:16], TEXT[16:]):
        assert_rows(ranks.through(book.text(chunk)), book, oracle, atol)
    for seed, nodes in enumerate(sizes):
        tree = grow(book, nodes, seed)
        assert_rows(ranks.through(book.builder.seal()), book, oracle, atol)
        if tree:
            book.commit(tree[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [pytest.param(size, marks=[pytest.mark.soak] if size in (4, 5, 8) else [])
                                  for size in range(1, 9)])
def test_any_number_of_ranks(model: Path, oracle: Oracle, tmp_path: Path, size: int,
                             kind: TensorKind) -> None:
    """More ranks than heads included."""
    ranks, book = Ranks(model, kind, size, tmp_path), Book()
    check(ranks, book, oracle, (1, 5, 8, 0, 11))
    hidden = to_torch(ranks.through(book.text([5, 6, 7])).hidden)
    head = load_lm_head(model, "fp32")
    with torch.inference_mode():
        theirs = oracle.model(torch.tensor([list(book.paths[book.committed[-1]])])).logits[0, -3:]
    torch.testing.assert_close(hidden @ head.T, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "extra"), FAMILIES)
def test_families(tmp_path: Path, family: str, extra: dict[str, object], kind: TensorKind) -> None:
    path = uneven(tmp_path / "model", family, **extra)
    check(Ranks(path, kind, 3, tmp_path), Book(), Oracle(path), (1, 9))


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(("family", "extra"), FAMILIES)
def test_families_on_any_number_of_ranks(tmp_path: Path, family: str, extra: dict[str, object], size: int,
                                         kind: TensorKind) -> None:
    path = uneven(tmp_path / "model", family, **extra)
    check(Ranks(path, kind, size, tmp_path), Book(), Oracle(path), (1, 5, 8, 0, 11))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_is_no_worse_than_transformers(
        model: Path, oracle: Oracle, tmp_path: Path, dtype: str, torch_dtype: torch.dtype, kind: TensorKind
) -> None:
    hidden = to_torch(Ranks(model, kind, 3, tmp_path, dtype).through(Book().text(TEXT)).hidden)
    assert hidden.dtype == torch_dtype
    exact = oracle.forward(TEXT)
    theirs = (Oracle(model, torch_dtype).forward(TEXT).float() - exact).abs()
    assert (hidden.float() - exact).abs().mean() < 2 * theirs.mean()


def test_a_rank_holds_its_slices_only(model: Path) -> None:
    """In sum: all weights once, but norms and embeddings on every rank, and shared key heads."""
    stored = load_file(model / "model.safetensors")
    replicated = sum(t.nbytes for name, t in stored.items() if "norm" in name or "embed" in name)
    sliced = sum(t.nbytes for name, t in stored.items() if name != "lm_head.weight") - replicated
    for size in (1, 2, 6):
        shards = [load_tensor_shard(model, "megatron", GlooGroup(rank, size, "unused"), "fp32")
                  for rank in range(size)]
        copies = sum(shard.heads.key_count for shard in shards) - 2
        shared = copies * 2 * 2 * 8 * 48 * 4  # layers, key and value, head_dim, H, bytes
        assert sum(shard.nbytes for shard in shards) == size * replicated + sliced + shared
        assert len({shard.digest for shard in shards}) == size
        assert {shard.layers for shard in shards} == {(0, 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_hints_change_nothing(model: Path, oracle: Oracle, tmp_path: Path, kind: TensorKind) -> None:
    """One rank sees a prune and a cancel, the other does not; both still run the same rows."""
    ranks, book = Ranks(model, kind, 2, tmp_path), Book()
    ranks.through(book.text(TEXT))
    tree = grow(book, 6, seed=1)
    book.given_up |= set(tree[3:])
    ranks.engines[0].prune(book.prune())
    ranks.engines[0].cancel(Cancel(1, 0, (1,)))
    assert_rows(ranks.through(book.builder.seal()), book, oracle)


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_change_with_the_segments(model: Path, oracle: Oracle, tmp_path: Path,
                                           kind: TensorKind) -> None:
    """The first rank has received the Close of session 1 and later Opens, the other not yet; both compute a
    segment of session 1 that is still in transit."""
    ranks, old, new = Ranks(model, kind, 2, tmp_path), Book(1), Book(3)
    ranks.through(old.text(TEXT))
    opens = [Open(session=2, epoch=0, capacity=64), Open(session=3, epoch=0, capacity=96)]
    first, last = ranks.engines
    first.close(Close(1))
    for message in opens:
        first.open(message)
    assert_rows(ranks.through(old.text([4, 5])), old, oracle)
    last.close(Close(1))
    for message in opens:
        last.open(message)
    assert_rows(ranks.through(new.text(TEXT)), new, oracle)
    assert first.counters["rows"] == last.counters["rows"] == len(TEXT)
    assert first.admit(old.text([6])) is None  # of a session that every rank has left behind


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_go_on_beside_one_another(model: Path, oracle: Oracle, tmp_path: Path,
                                           kind: TensorKind) -> None:
    """The ranks receive Opens and Closes at different moments; segments of both sessions alternate."""
    ranks, books = Ranks(model, kind, 2, tmp_path), {session: Book(session) for session in (1, 2, 3)}
    first, last = ranks.engines
    first.open(Open(session=2, epoch=0, capacity=64, concurrent=(1,)))
    assert_rows(ranks.through(books[1].text(TEXT[:5])), books[1], oracle)
    last.open(Open(session=2, epoch=0, capacity=64, concurrent=(1,)))
    assert_rows(ranks.through(books[2].text(TEXT[5:9])), books[2], oracle)
    assert_rows(ranks.through(books[1].text(TEXT[9:])), books[1], oracle)
    last.close(Close(1))
    for engine in ranks.engines:
        engine.open(Open(session=3, epoch=0, capacity=64, concurrent=(2,)))
    assert_rows(ranks.through(books[2].text(TEXT[:3])), books[2], oracle)
    assert first.counters_of(1)["rows"] == 13
    assert_rows(ranks.through(books[3].text(TEXT[3:5])), books[3], oracle)
    for engine in ranks.engines:
        assert [engine.cached(session) for session in books] == [0, 7, 2]
        assert engine.counters_of(2)["collective_bytes"] > engine.counters_of(3)["collective_bytes"] > 0
    assert first.admit(books[1].text([6])) is None


@pytest.mark.parametrize("kind", KINDS)
def test_kept_rows_change_hands_with_the_segments(model: Path, oracle: Oracle, tmp_path: Path,
                                                  kind: TensorKind) -> None:
    """The first rank has received it, the other not yet, while a segment of the old session is in transit."""
    ranks, old, new = Ranks(model, kind, 2, tmp_path), Book(1), Book(2, kept=tuple(TEXT[:7]))
    ranks.through(old.text(TEXT))
    first, last = ranks.engines
    for engine in (first, last):
        engine.close(Close(1, tuple(range(9))))
        engine.open(Open(session=2, epoch=0, capacity=64, parent_session=1, rows=7))
        if engine is first:
            assert_rows(ranks.through(old.text([4])), old, oracle)
    assert_rows(ranks.through(new.text(TEXT[7:])), new, oracle)
    assert [engine.cached(2) for engine in ranks.engines] == [len(TEXT)] * 2


def test_bytes_are_counted_from_the_start_of_a_session(model: Path, tmp_path: Path) -> None:
    ranks = Ranks(model, "galaxy", 3, tmp_path)
    ring = (2 * 4 + 1) * 2  # four rings a layer and the last one; two steps each
    for session, rows in ((1, 17), (2, 4)):
        for engine in ranks.engines:
            engine.open(Open(session=session, epoch=0, capacity=64))
        ranks.through(Book(session).text(TEXT[:rows]))
        tile = -(-rows // 3) * 48 * 4
        assert [engine.counters["collective_bytes"] for engine in ranks.engines] == [ring * tile] * 3


def test_taps_are_refused(model: Path) -> None:
    engine = Ranks(model, "megatron", 1, Path("unused")).engines[0]
    book = Book()
    book.add(1, None, committed=True)
    with pytest.raises(ProtocolError, match="segment 0 of session 1 asks for taps"):
        engine.admit(book.builder.seal((1,)))


@pytest.mark.parametrize(("name", "value", "complaint"), [
    ("model.layers.1.mlp.up_proj.weight", None, r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
    ("model.layers.0.self_attn.o_proj.weight", torch.ones(48, 47),
     r"o_proj\.weight has shape \[48, 47\], config\.json asks for \[48, 48\]"),
    ("model.layers.0.input_layernorm.weight", torch.ones(3), r"input_layernorm\.weight has shape \[3\]"),
])
def test_what_is_wrong_with_a_checkpoint_is_named(tmp_path: Path, name: str, value: torch.Tensor | None,
                                                  complaint: str) -> None:
    file = uneven(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors if value is None else {**tensors, name: value}, file, metadata={"format": "pt"})
    with pytest.raises(FlowspecError, match=complaint):
        load_tensor_shard(tmp_path, "galaxy", GlooGroup(1, 2, "unused"), "fp32")
