"""The error for a model that does not fit: bytes, and advice that is true."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kits.family_checkpoints import family_model
from kits.mtp_layers import with_mtp
from kits.planned_boards import MB, board, problem, size

from flowspec_edge.boards.deploy.resolve import drafting
from flowspec_edge.boards.inventory import ClusterSettings
from flowspec_edge.boards.planning.layer_split import plan_as_listed, split_in_order
from flowspec_edge.boards.planning.memory_check import MemoryCheck, memory_error
from flowspec_edge.boards.planning.model_size import ModelBytes, PlanDtype
from flowspec_edge.boards.planning.planner import CandidateBoard, DoesNotFit, SplitProblem, plan
from flowspec_edge.model.manifest import CacheBits
from flowspec_edge.model.opened import OpenModel


def sizes(of: ModelBytes) -> dict[PlanDtype, ModelBytes]:
    return {"fp16": of, "int4": replace(of, dtype="int4", layer=of.layer * 17 // 64)}


def refused(boards: list[CandidateBoard], p: SplitProblem) -> str:
    with pytest.raises(DoesNotFit):
        plan(boards, p)

    def size_in(dtype: PlanDtype, kv_cache: CacheBits) -> ModelBytes:
        of = sizes(p.size)[dtype]
        return replace(of, kv_cache=kv_cache, kv_row=of.kv_row // 2) if kv_cache == "int8" else of

    return str(memory_error(boards, p, size_in))


def test_the_error_has_bytes_and_advice() -> None:
    p = problem(context=4096)
    boards = [board("a"), board("b"), board("c", usable_mb=4000)]
    text = refused(boards, p)
    whole = (32 * (p.size.layer + 5120 * 16_000) + p.size.norm + p.d0) / MB
    assert text.startswith(f"model in fp16 with 4096 tokens of context needs {whole:,.0f} MB: 32 layers of "
                           "400 MB and 82 MB of cache, 1,312 MB on D0")
    # A board of 6000 MB that c can draft for leaves 5500: 11 layers.
    assert "Beside D0 there is room for 22 layers; 10 layers (4,819 MB) are missing" in text
    assert "Room beside the process: a, b each 5,500 MB, 11 layers; c 3,500 MB, 7 layers." in text
    advice = text.split("What would help: ")[1]
    assert advice == "--dtype int4, or 1 more like a"
    assert plan(boards, replace(p, size=sizes(p.size)["int4"]))
    assert plan([*boards, board("d")], p)
    with pytest.raises(DoesNotFit):
        plan(boards, replace(p, context=512))


def test_caches_in_8_bits_are_advised_where_they_suffice() -> None:
    p = problem(size(layers=11), context=8192)
    boards = [board("a"), board("b", usable_mb=5900)]
    assert "What would help: --dtype int4, or --kv-cache int8, or --context 4096" in refused(boards, p)
    assert plan(boards, replace(p, size=replace(p.size, kv_row=p.size.kv_row // 2)))


def test_a_shorter_context_is_the_longest_that_fits() -> None:
    p = problem(size(layers=12), context=8192)
    boards = [board("a"), board("b", usable_mb=5900)]
    text = refused(boards, p)
    assert "--context 2048," in text
    assert plan(boards, replace(p, context=2048))
    with pytest.raises(DoesNotFit):
        plan(boards, replace(p, context=4096))


@pytest.mark.parametrize(("draft", "counted"), [("ngram", False), ("mtp", True)])
def test_an_mtp_layer_counts_where_it_drafts(tmp_path: Path, draft: str, counted: bool) -> None:
    target = with_mtp(family_model("qwen3.5", tmp_path / "target"))
    cluster = ClusterSettings(name="lab", draft=draft)
    found = MemoryCheck(str(target), "fp32", cluster, 1, 3, {}, drafting(cluster, OpenModel(target))).problem
    assert (found.d0_part > found.size.lm_head) == counted


def test_no_board_can_draft() -> None:
    boards = [board("a", role="verify", usable_mb=30_000), board("b", usable_mb=1000)]
    text = refused(boards, problem())
    assert "No board that may draft has room for D0's part. Room beside the process: a 29,500 MB, 32" in text
    assert "What would help: 1 more like a" in text


def test_no_advice_if_not_even_a_layer_fits() -> None:
    text = refused([board("a", usable_mb=700), board("b", usable_mb=700)], problem())
    assert text.endswith("More memory on each board would help")


def test_the_error_says_if_other_layers_fit() -> None:
    p = problem(size(layers=6, layer_mb=400, embedding_mb=250, kv_row=0), tentative=0)
    boards = [board("d", role="draft"), board("a", role="verify", usable_mb=1100),
              board("b", role="verify", usable_mb=3000)]
    with pytest.raises(DoesNotFit):
        plan_as_listed(boards[0], boards[1:], p, ((0, 3), (3, 6)))
    assert split_in_order(boards[1:], p) == ((0, 1), (1, 6))
    text = str(memory_error(boards, p, lambda dtype, kv_cache: p.size))
    assert "does not fit on the boards as they are listed" in text
    assert 'let the planner choose, with role = "auto"' in text
    assert plan(boards, p)
