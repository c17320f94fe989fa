"""Every supported family, against transformers' unsharded model."""

from __future__ import annotations

from functools import lru_cache
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from kits.family_checkpoints import FAMILIES, VOCAB, WINDOW, family_model
from kits.stages import Book, engines, random_tokens, through
from kits.torch_devices import needs_cuda
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowspec_edge.messages import Close, Open, Output
from flowspec_edge.stage.layers.stage_cache import reusable
from flowspec_edge.stage.shard import load_lm_head
from flowspec_edge.util.tensors import to_torch

TEXT = random_tokens(24, VOCAB, seed=3)
assert len(TEXT) > WINDOW


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    return {name: family_model(name, base / name) for name in FAMILIES}


class Reference:
    """transformers' logits for the last token of a text: [V]."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def logits(self, text: tuple[int, ...]) -> Tensor:
        if text not in self._known:
            rows = self._model(torch.tensor([text]), use_cache=False).logits[0].float()
            self._known.update({text[: n + 1]: row for n, row in enumerate(rows)})
        return self._known[text]


@lru_cache(maxsize=2)
def reference(path: Path, dtype: torch.dtype = torch.float32) -> Reference:
    found = Reference(path, dtype)
    found.logits(tuple(TEXT))  # and with it those of all its beginnings
    return found


def run(path: Path, stages: int, dtype: str = "fp32", device: str = "cpu", row_step: int | None = None
        ) -> list[tuple[tuple[int, ...], Tensor]]:
    """(text, logits [V]) of a prompt in two pieces, of a random draft tree in two segments, of a row behind a commit
    in it, and of a session that goes on from the prompt's retained rows."""
    book, chain, rng = Book(), engines(path, stages, dtype, 256, device, row_step), np.random.default_rng(0)
    head = load_lm_head(path, dtype)
    found = []

    def collect(output: Output) -> None:
        rows = (to_torch(output.hidden) @ head.mT).float()
        found.extend((book.paths[n], row) for n, row in zip(output.numbers.tolist(), rows, strict=True))

    collect(through(chain, book.text(TEXT[:17]))[1])
    collect(through(chain, book.text(TEXT[17:]))[1])
    nodes = book.committed[-1:]
    for _ in range(2):
        for _ in range(5):
            parent = nodes[int(rng.integers(len(nodes)))]
            nodes.append(book.add(int(rng.integers(VOCAB)), parent))
        collect(through(chain, book.builder.seal())[1])
    book.commit(nodes[1])
    collect(through(chain, book.text([5]))[1])
    kinds = [kind for engine in chain for kind in engine.model.kinds]
    if rows := reusable(kinds, len(book.committed), len(TEXT) - 1):  # recurrent layers have no snapshot there
        for engine in chain:
            engine.close(Close(1, tuple(book.committed)))
            engine.open(Open(2, 0, 64, parent_session=1, rows=rows))
        book = Book(2, kept=tuple(TEXT[:rows]))
        collect(through(chain, book.text([5, 9]))[1])
    return found


@pytest.mark.parametrize(("name", "stages"), [*zip(FAMILIES, cycle((2, 4)), strict=False)])
def test_logits_are_those_of_transformers(models: dict[str, Path], name: str, stages: int) -> None:
    exact = reference(models[name])
    rows = run(models[name], stages, row_step=16 if stages == 2 else 1)  # with and without padding
    assert len(rows) >= len(TEXT) + 11
    for text, logits in rows:
        torch.testing.assert_close(logits, exact.logits(text), atol=tolerance(name), rtol=0)


@needs_cuda
def test_logits_on_a_gpu(models: dict[str, Path]) -> None:
    for name, path in models.items():
        exact = reference(path)
        for text, logits in run(path, 2, device="cuda"):
            torch.testing.assert_close(logits, exact.logits(text), atol=tolerance(name), rtol=0)


def tolerance(name: str) -> float:
    """Transformers' own chunks and steps differ by 1.2e-4 in recurrent layers, which norm small outputs."""
    return 5e-4 if name.startswith(("qwen3-next", "qwen3.5")) else 1e-4


@pytest.mark.parametrize("name", ["llama-biases", "mistral-window", "qwen3", "qwen3-moe", "gpt-oss", "gemma3"])
def test_bf16_is_as_near_as_transformers_in_bf16(models: dict[str, Path], name: str) -> None:
    """On average over all rows, within 1.5 times transformers' own distance from fp32."""
    exact, theirs = reference(models[name]), reference(models[name], torch.bfloat16)
    rows = run(models[name], 2, "bf16")
    truth = torch.stack([exact.logits(text) for text, _ in rows])
    ours = (torch.stack([logits for _, logits in rows]) - truth).abs().mean()
    allowed = (torch.stack([theirs.logits(text) for text, _ in rows]) - truth).abs().mean()
    assert 0 < ours < 1.5 * allowed
