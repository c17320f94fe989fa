"""Sharded models of several families, in 16 and in 4 bits, against the same files run in one piece."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.family_checkpoints import SMALL, family_dir
from kits.stages import Book, engines, through
from kits.virtual_clusters import cluster

from flowspec_edge.d0.request import Request
from flowspec_edge.lab.plain import load_reference_model
from flowspec_edge.sharding.job import run
from flowspec_edge.sharding.plan import make_plan, ranges_for, recipe_for
from flowspec_edge.sharding.source import open_source
from flowspec_edge.stage.output_head import load_output_head
from flowspec_edge.util.tensors import to_torch

PROMPT = [5, 17, 42, 3, 3, 58, 11]
NEW = 8
SOME = ("flowspec", "pipedec")  # in turn
# family, stages, how weights are stored, what is computed in
EXACT = [("llama-tied", 4, "fp32", "fp32"), ("qwen3", 2, "int4", "fp32"), ("qwen3-moe", 3, "int4", "fp32"),
         ("mistral-window", 4, "int4", "fp32"), ("mixtral", 2, "fp32", "fp32")]
ROUNDED = [("llama-llama3", 4, "bf16", "bf16"), ("gemma3-tied", 2, "int4", "bf16")]
Case = tuple[str, int, str, str]


def in_turn(case: Case) -> str:
    return SOME[[*EXACT, *ROUNDED].index(case) % 2]


def label(value: Case | str) -> str:
    return value if isinstance(value, str) else "-".join(map(str, value))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@cache
def sharded(base: Path, case: Case) -> Path:
    """The family's model, cut; 64 wide, so that matrices have groups."""
    family, stages, dtype, compute = case
    source, out = base / f"{family}-{stages}-{dtype}", base / f"{family}-{stages}-{dtype}-{compute}-cut"
    family_dir(family, source, hidden=64)
    opened = open_source(str(source), [])
    recipe = recipe_for(opened, dtype, None, compute)  # type: ignore[arg-type]
    manifest = run(make_plan(opened, recipe, ranges_for(opened.layers, stages, None)), out)
    assert (manifest.quantisation.kind if manifest.quantisation else dtype) == dtype == manifest.dtype
    return out


@lru_cache(maxsize=2)
def whole(model: Path, dtype: str) -> Any:
    return load_reference_model(model, dtype)


@torch.inference_mode()
def logits(model: Path, dtype: str, text: list[int]) -> torch.Tensor:
    """Of the model in one piece: [n, V] in fp32."""
    return torch.as_tensor(whole(model, dtype)(torch.tensor([text]), use_cache=False).logits[0]).float()


@cache
def produced(base: Path, case: Case, name: str) -> list[int]:
    _, stages, _, compute = case
    request = Request(PROMPT, name, NEW, params=SMALL)
    tokens = cluster(sharded(base, case), stages, compute).generate(request).tokens
    assert len(tokens) == NEW
    return tokens


def check_tokens(base: Path, case: Case, name: str) -> None:
    """The likeliest under the model in one piece.  In 16 bits segments of other lengths are summed in another order, so
    that tokens which are nearly as likely may change places: those within a twentieth of the logits' spread."""
    tokens = produced(base, case, name)
    rows = logits(sharded(base, case), case[3], [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    behind = rows.max(dim=-1).values - rows[range(NEW), tokens]
    assert behind.max() < (1e-4 if case[3] == "fp32" else 0.05 * rows.std())


def check_logits(base: Path, case: Case) -> None:
    _, stages, _, compute = case
    model = sharded(base, case)
    text = [*PROMPT, *produced(base, case, in_turn(case))]
    chain, book = engines(model, stages, compute), Book()
    head = load_output_head(model, compute)
    pieces = [through(chain, book.text(part))[1] for part in (text[:4], text[4:])]
    ours = torch.cat([head(to_torch(piece.hidden)).float() for piece in pieces])
    theirs = logits(model, compute, text)
    tolerance = 1e-4 if compute == "fp32" else 0.1 * float(theirs.std())
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("case", [*EXACT, *ROUNDED], ids=label)
def test_tokens_and_logits_are_those_of_the_model_in_one_piece(base: Path, case: Case) -> None:
    """fp32 within 1e-4, also of matrices in 4 bits; 16 bits within a tenth of the logits' spread (measured: a
    twentieth)."""
    check_tokens(base, case, in_turn(case))
    check_logits(base, case)
