"""D0 and its stages compute on one device, shown without a GPU: no operation mixes devices, and no logits
come down.  All values on the stand-in are zeros, so the texts mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.cases import DISTINCT
from kits.meta_device import MetaDevice
from kits.tiny_model_dir import tiny_eagle3, tiny_model_dir

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.strategies.params import Params

VOCABULARY = 300  # more than any other width here
CASES = [(name, "own") for name in DISTINCT] + [("flowspec", kind) for kind in ("eagle3", "lm", "ngram")]
SAMPLINGS = [Sampling(), Sampling(1.0, seed=1), Sampling(0.7, top_k=20, top_p=0.8, seed=2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2, vocab=VOCABULARY)
    tiny_eagle3(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "draft"), CASES)
def test_no_strategy_mixes_devices(model: Path, strategy: str, draft: str) -> None:
    """FlowSpec+ samples in all three ways, the others in one each, in turn; `make test-strict` has all."""
    params, at = Params(draft=draft), CASES.index((strategy, draft)) % 3
    with MetaDevice() as device:
        cluster = VirtualCluster(model, 2, load_profile("paper-7b"), "fp16", device="meta")
        assert cluster._model.sessions._lm_head.head.device.type == "meta"
        assert [engine.model.device.type for engine in cluster._engines[2]] == ["meta"] * 2
        for sampling in SAMPLINGS if strategy == "flowspec_plus" else SAMPLINGS[at : at + 1]:
            device.downloads.clear()
            count = 6 if sampling.greedy else 3  # what differs is done for every token
            result = cluster.generate(Request([1, 2, 3], strategy, count, sampling, params))
            assert len(result.tokens) == count
            assert device.downloads
            if sampling.greedy:  # sampled, the sampler looks at rows where it sees a tie, and zeros all tie
                assert [shape for shape in device.downloads if VOCABULARY in shape] == []
