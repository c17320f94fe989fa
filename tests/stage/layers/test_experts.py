"""Mixtures of experts against transformers' own blocks; what is counted; damaged experts and routers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.family_checkpoints import family_dir
from kits.sharded_models import edit
from kits.stages import Book, engines, random_tokens, through
from torch import nn
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.plain import separated
from flowspec_edge.model.expert_counts import correlated, independent
from flowspec_edge.model.experts import (
    Experts,
    correlation_of,
    touched,
)
from flowspec_edge.model.families import FAMILIES
from flowspec_edge.sharding.source import open_source
from flowspec_edge.stage.shard import load_shard

WIDTH, INNER = 32, 24
_BLOCKS: dict[str, Any] = {"qwen3_moe": Qwen3MoeSparseMoeBlock, "mixtral": MixtralSparseMoeBlock}
_MATRICES = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


def blocks(family: str, experts: int, chosen: int) -> tuple[Any, Any]:
    """transformers' mixture with random weights, and ours with the same."""
    config = AutoConfig.for_model(family, hidden_size=WIDTH, intermediate_size=INNER,
                                  moe_intermediate_size=INNER, num_local_experts=experts,
                                  num_experts_per_tok=chosen)
    theirs, ours = _BLOCKS[family](config), _BLOCKS[family](config)
    for value in theirs.parameters():
        nn.init.normal_(value, std=0.3)
    names = FAMILIES[family].experts
    assert names is not None
    ours.gate = theirs.gate
    ours.experts = separated(theirs.experts, names)
    for expert, gate_up, down in zip(ours.experts, theirs.experts.gate_up_proj, theirs.experts.down_proj,
                                     strict=True):
        parts = (gate_up[:INNER], gate_up[INNER:], down)
        expert.load_state_dict({f"{name}.weight": part.detach() for name, part in
                                zip(_MATRICES[family], parts, strict=True)}, assign=True)
    return theirs, ours


@pytest.mark.parametrize("family", _BLOCKS)
@given(rows=st.integers(1, 20), experts=st.integers(1, 9), seed=st.integers(0, 99), data=st.data())
def test_a_mixture_is_transformers_own(family: str, rows: int, experts: int, seed: int, data: st.DataObject
                                       ) -> None:
    """And experts that no row has chosen do not run."""
    torch.manual_seed(seed)
    theirs, ours = blocks(family, experts, data.draw(st.integers(1, experts)))
    x = torch.randn(1, rows, WIDTH)
    with torch.inference_mode():
        expected = theirs(x)
        torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)
        chosen = set(ours.gate(x)[2].flatten().tolist())
        for i in set(range(experts)) - chosen:
            ours.experts.register_module(str(i), None)
        torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 16, 32])
def test_a_random_router_touches_what_independent_rows_do(rows: int) -> None:
    """Qwen3-30B-A3B's 8 of 128, within 4 standard errors of the mean of 200 segments."""
    torch.manual_seed(rows)
    experts, chosen, segments = 128, 8, 200
    mixture, counts = Experts(), []
    mixture.extend(nn.Identity() for _ in range(experts))
    layer = nn.Module()
    layer.experts = mixture
    for _ in range(segments):
        mixture.expert_ids = torch.rand(rows + 2, experts).topk(chosen).indices
        found, expected = touched([layer], 1, rows + 1)
        assert found == len({int(i) for i in mixture.expert_ids[1 : rows + 1].flatten()})
        assert expected == pytest.approx(independent(experts, chosen, rows))
        counts.append(float(found))
    error = 4 * torch.tensor(counts).std() / segments**0.5 + 1e-9
    assert abs(sum(counts) / segments - independent(experts, chosen, rows)) <= error


@pytest.mark.parametrize(("rows", "same"), [(2, 0.0), (16, 0.0), (2, 1.0), (16, 1.0)])
def test_correlation_of_equal_and_of_independent_rows(rows: int, same: float) -> None:
    """60 layers, 8 of 128 experts: within a tenth of what the formula was made for."""
    layers = []
    for seed in range(60):
        layer, mixture = nn.Module(), Experts(nn.Identity() for _ in range(128))
        layer.experts = mixture
        draws = torch.rand(1 if same else rows, 128, generator=torch.Generator().manual_seed(seed))
        mixture.expert_ids = draws.topk(8).indices.expand(rows, -1)
        layers.append(layer)
    found = correlation_of(layers, rows)
    assert found == pytest.approx(same, abs=0.1)
    assert correlation_of(layers, rows + 1) is None  # another pass
    assert found is not None
    counted = touched(layers, 0, rows)[0] / 60
    assert correlated(128, 8, rows, found) == pytest.approx(counted)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_dir("qwen3-moe", tmp_path_factory.mktemp("sparse")) / "target"


def test_a_stage_counts_by_segment_and_by_session(model: Path) -> None:
    book, chain = Book(), engines(model, 2)
    through(chain, book.text(random_tokens(9, 61, seed=1)))
    root, (first, last) = book.committed[-1], chain
    for token in range(4):
        book.add(token, root)
    before = first.counters_of(1)
    through(chain, book.builder.seal())
    added = {name: value - before[name] for name, value in first.counters_of(1).items()}
    mixtures = [layer.experts for layer in first.model.modules]
    assert added["experts"] == sum(len(set(mixture.expert_ids.flatten().tolist())) for mixture in mixtures)
    assert added["experts_independent"] == pytest.approx(2 * independent(8, 3, 4))
    assert last.counters["experts"] > 0


_LAYER = "model.layers.1.mlp"


@pytest.mark.parametrize(("name", "value", "says"), [
    (f"{_LAYER}.experts.5.up_proj.weight", None, r"has no tensor .*\.1\.mlp\.experts\.5\.up_proj\.weight"),
    (f"{_LAYER}.experts.5.down_proj.weight", torch.ones(32, 31),
     r"experts\.5\.down_proj\.weight has shape \[32, 31\], config\.json asks for \[32, 32\]"),
    (f"{_LAYER}.experts.8.up_proj.weight", torch.ones(32, 32),
     r"no module of the model has a place for tensor .*experts\.8\.up_proj\.weight"),
    (f"{_LAYER}.gate.weight", torch.ones(7, 32), r"gate\.weight has shape \[7, 32\], .* asks for \[8, 32\]"),
    (f"{_LAYER}.gate.weight", None, r"has no tensor model\.layers\.1\.mlp\.gate\.weight"),
])
def test_damaged_experts_and_routers_are_named(model: Path, tmp_path: Path, name: str,
                                               value: torch.Tensor | None, says: str) -> None:
    path = Path(shutil.copytree(model, tmp_path / "model"))
    edit(path, **{name.replace(".", "__"): value})
    readers = [lambda: load_shard(path, 0, 2, "fp32"), lambda: open_source(str(path), [])]
    if "experts.8" not in name:  # the planner asks for the tensors that it knows
        readers.append(lambda: model_bytes(str(path), "fp32"))
    for read in readers:
        with pytest.raises(FlowspecError, match=says) as caught:
            read()
        assert "\n" not in str(caught.value)
