"""Block drafters in whole runs: the tokens of plain decoding, and states that are the target's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kits.block_drafters import VARIANTS, VOCABULARY, WIDTH, published_block
from kits.requests import text
from kits.tiny_models import tiny_llama
from kits.transformers_generate import captured_states

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drafting.block.drafter import BlockDrafter
from flowspec_edge.drafting.block.formats import block_config
from flowspec_edge.drafting.tapped import TappedStates
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import UsageError
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.params import Params
from flowspec_edge.tree.draft_api import DraftOutput, DraftRequest

PROFILE = load_profile("paper-7b")
PROMPT = tuple((11 * i + 5) % VOCABULARY for i in range(13))
SAMPLINGS = (Sampling(), Sampling(1.0, seed=11))


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("block") / "target"
    tiny_llama(path, layers=8, hidden=WIDTH, vocab=VOCABULARY)
    return path


def with_a_head(target: Path, path: Path, kind: str, **options: Any) -> Path:
    (path / "target").symlink_to(target)
    published_block(path / kind, 3, **options)
    return path


@pytest.mark.parametrize("variant", [
    variant if variant in ("z-lab", "z-lab, DFlash2", "DeepSpec", "speculators, DSpark")
    else pytest.param(variant, marks=pytest.mark.slow) for variant in VARIANTS])
def test_every_published_variant_drafts_losslessly(target: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    options: dict[str, Any] = dict(VARIANTS[variant])  # type: ignore[call-overload]
    kind = "dspark" if options.get("rank") else "dflash"
    model = with_a_head(target, tmp_path, kind, **options)
    odd = list(VARIANTS).index(variant) % 2
    taken: list[torch.Tensor] = []
    take = TappedStates.take
    monkeypatch.setattr(TappedStates, "take", lambda self, rows: taken.append(take(self, rows)) or taken[-1])
    for name in ("flowspec", "flowspec_plus")[:: 1 - 2 * odd]:
        taken.clear()
        request = Request(PROMPT, name, 10, SAMPLINGS[odd], Params(
            draft=kind, segment=4, width=4, tree_size=12, depth=3, prefill_chunk=8))  # type: ignore[arg-type]
        result = VirtualCluster(model, 2 + odd, PROFILE).generate(request)
        assert result.tokens == text(target, PROMPT, 10, SAMPLINGS[odd]), name
        assert result.stats.drafted > 0
        whole = (*PROMPT, *result.tokens)
        known = torch.cat(taken)[: len(whole) - 1]
        expected = captured_states(model, whole, block_config(model / kind).captured)
        torch.testing.assert_close(known, expected[: len(known)], atol=1e-4, rtol=1e-4)


def test_what_lies_beyond_a_block_is_asked_for_later(target: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of three depths behind four stages: nodes in flight are deeper than a block."""
    model = with_a_head(target, tmp_path, "dspark", form="deepspec", ids=[1, 5], rank=4, block=3)
    deferred: set[int] = set()
    later: set[int] = set()
    expand = BlockDrafter.expand

    def count(self: BlockDrafter, request: DraftRequest) -> DraftOutput:
        output = expand(self, request)
        assert output.beyond is not None
        for node, beyond in zip(request.nodes, output.beyond.tolist(), strict=True):
            (deferred if beyond else later).add(node.id)
        return output

    monkeypatch.setattr(BlockDrafter, "expand", count)
    request = Request(PROMPT, "flowspec_plus", 12, Sampling(0.4, seed=2), Params(draft="dspark"))
    result = VirtualCluster(model, 4, PROFILE).generate(request)
    assert result.tokens == text(target, PROMPT, 12, Sampling(0.4, seed=2))
    assert deferred & later


def test_it_stands_in_for_a_head_and_needs_a_pipeline(target: Path, tmp_path: Path) -> None:
    model = with_a_head(target, tmp_path, "dflash", ids=[1, 5])
    cluster = VirtualCluster(model, 2, PROFILE)
    result = cluster.generate(Request(PROMPT, "flowspec", 8))
    assert result.tokens == text(target, PROMPT, 8, Sampling())
    named = Request(PROMPT, "flowspec", 8, Sampling(), Params(draft="dflash"))
    assert result.stats == cluster.generate(named).stats  # it takes its own time
    with pytest.raises(UsageError, match="galaxy cannot draft with the model's DFlash block drafter"):
        cluster.generate(Request(PROMPT, "galaxy", 4, Sampling(), Params(draft="dflash")))
