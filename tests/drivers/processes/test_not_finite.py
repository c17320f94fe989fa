"""Activations that overflow fp16 end the request that has them, with their cause, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.process_clusters import PROMPT
from kits.tiny_model_dir import tiny_model_dir
from safetensors.torch import load_file, save_file

from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.errors import RequestFailed

LARGE = 299  # a token whose states grow beyond fp16 in the layers; no text of the model has it
AT = 67  # its place in the prompt, in the second chunk, which begins at 64: the rows before it do not see it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2)
    file = path / "target/model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][LARGE] = 65_500.0
    weights["model.layers.0.mlp.down_proj.weight"] *= 100
    weights["lm_head.weight"][LARGE] = 0.0
    save_file(weights, file, {"format": "pt"})
    return path


@pytest.mark.slow
def test_only_its_own_request_ends(model: Path) -> None:
    spoiled = [*PROMPT[:AT], LARGE, *PROMPT[AT:]]
    other = Request(PROMPT, "autoregressive", max_new_tokens=12)  # its rows are always computed alone
    with ProcessCluster(ClusterSpec(model, 2, "fp16", threads=1)).start() as cluster:
        alone = cluster.generate(other).tokens
        requests = [other, Request(spoiled, "flowspec", max_new_tokens=12), other]
        handles = [cluster.submit(request) for request in requests]
        cluster.serve(lambda: all(handle.done() for handle in handles))
        with pytest.raises(RequestFailed, match="from position 67 on: activations overflow float16"):
            handles[1].result()
        assert [handles[n].result().tokens for n in (0, 2)] == [alone, alone]
        assert len(cluster.generate(Request(PROMPT, "flowspec", max_new_tokens=12)).tokens) == 12
