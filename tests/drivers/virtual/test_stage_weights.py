"""Virtual time holds the weights once, however many stages share them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kits.sharded_models import cut
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.loaded import StageWeights
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.stage.shard import Shard, load_shard

PROFILE = load_profile("paper-7b")
PROMPT = [5, 9, 20, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=4)


def places(shards: list[Shard]) -> dict[str, int]:
    """Where every weight lies, by its name in the whole model."""
    found = {}
    for shard in shards:
        named = {f"layers.{i}": layer for i, layer in enumerate(shard.modules, start=shard.layers[0])}
        named |= {name: module for name, module in (("embed", shard.embed), ("norm", shard.norm)) if module}
        found |= {f"{name}.{key}": tensor.data_ptr() for name, module in named.items()
                  for key, tensor in module.state_dict().items()}
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_every_cut_has_the_same_tensors(model: Path, stages: int) -> None:
    weights = StageWeights(OpenModel(model), "fp32")
    once = places(weights.shards(1))
    assert len(set(once.values())) == len(once)
    assert places(weights.shards(stages)) == once


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_cut_is_what_would_be_loaded(model: Path, stages: int) -> None:
    for i, shard in enumerate(StageWeights(OpenModel(model), "fp32").shards(stages)):
        alone = load_shard(model / "target", i, stages, "fp32")
        assert (shard.index, shard.stages, shard.layers, shard.nbytes) == (
            alone.index, alone.stages, alone.layers, alone.nbytes)
        assert (shard.embed is None, shard.norm is None) == (alone.embed is None, alone.norm is None)
        for mine, other in zip(shard.modules, alone.modules, strict=True):
            theirs = other.state_dict()
            assert all(torch.equal(value, theirs[key]) for key, value in mine.state_dict().items())


def test_a_part_is_cut_by_the_whole_models_layers(model: Path) -> None:
    part = load_shard(model / "target", 1, 2, "fp32")
    assert part.layers == (2, 4)
    first, last = part.subset(1, 3, (2, 3)), part.subset(2, 3, (3, 4))
    assert (first.modules, last.modules) == (part.modules[:1], part.modules[1:])
    assert (first.embed, first.norm, last.embed, last.norm) == (None, None, None, part.norm)


def test_a_sharded_models_parts_are_loaded_once(model: Path, tmp_path: Path) -> None:
    cut(model / "target", tmp_path / "cut", 2, split=[3, 1])
    weights = StageWeights(OpenModel(tmp_path / "cut"), "fp16")
    first = weights.shards(2)
    assert [shard.layers for shard in first] == [(0, 3), (3, 4)]
    assert places(weights.shards(2)) == places(first)


def test_strategies_and_points_share_the_weights(model: Path) -> None:
    """A pipeline of three and a group of three, then two and five stages under another profile."""
    cluster = VirtualCluster(model, 3, PROFILE)
    expected, _ = PlainDecoder(model).generate(PROMPT, 6, Sampling())
    used = []
    for stages in (3, 2, 5):
        cluster = cluster.under(load_profile("paper-13b-int4"), stages) if stages != 3 else cluster
        for strategy in ("flowspec", "megatron"):
            result = cluster.generate(Request(PROMPT, strategy, 6))
            assert result.tokens == expected
            fresh = VirtualCluster(model, stages, cluster.devices)
            assert fresh.generate(Request(PROMPT, strategy, 6)).stats == result.stats
        used += [places([engine.model for engine in engines])
                 for engines in (*cluster._engines.values(), cluster._whole)]
    assert len(used) == 2 + 2 + 2
    assert all(each == used[0] for each in used)
