"""A model's own MTP layer drafts: the tokens of transformers' ``generate``, from a whole model and a sharded
one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kits.family_checkpoints import SMALL, VOCAB, family_dir, generated
from kits.mtp_layers import with_mtp
from kits.sharded_models import cut
from kits.stages import random_tokens
from safetensors.torch import load_file

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.model.manifest import Manifest
from flowspec_edge.sampling.rule import Sampling

PROMPT, NEW = random_tokens(21, VOCAB, seed=7), 9
DRAWN = Sampling(temperature=1.0, seed=3)


@pytest.mark.parametrize(("family", "stacked"), [
    pytest.param("qwen3-next", False, marks=pytest.mark.slow), ("qwen3.5-moe", True)])
def test_texts_are_those_of_the_model(tmp_path: Path, family: str, stacked: bool) -> None:
    model = family_dir(family, tmp_path / "model")
    with_mtp(model / "target", stacked=stacked)
    cut(model / "target", tmp_path / "sharded", dtype="fp32")
    params = replace(SMALL, draft="mtp")
    runs = [(model, "flowspec", Sampling()), (model / "target", "flowspec_plus", DRAWN),
            (tmp_path / "sharded", "flowspec", DRAWN), (tmp_path / "sharded", "flowspec_plus", Sampling())]
    truth = {Sampling(): generated(model / "target", PROMPT, NEW)}
    for path, strategy, sampling in runs:
        cluster = VirtualCluster(path, 2, load_profile("paper-7b"), "fp32")
        if sampling not in truth:
            truth[sampling] = cluster.generate(Request(PROMPT, "autoregressive", NEW, sampling)).tokens
        result = cluster.generate(Request(PROMPT, strategy, NEW, sampling, params))
        assert result.tokens == truth[sampling], (path, strategy)
        assert result.stats.drafted > 0


def test_only_the_draft_device_gets_it(tmp_path: Path) -> None:
    model = family_dir("qwen3.5-moe", tmp_path / "model")
    with_mtp(model / "target", stacked=True)
    out = tmp_path / "out"
    cut(model / "target", out, dtype="bf16")
    assert not [path for path in out.glob("stage-*/*.safetensors")
                if any(name.startswith("mtp.") for name in load_file(path))]
    stored = load_file(out / "draft" / "mtp" / "model.safetensors")
    assert "mtp.layers.0.mlp.experts.5.up_proj.weight" in stored
    assert "model.embed_tokens.weight" in load_file(out / "draft" / "target" / "model.safetensors")
    counted = sum(tensor.numel() for tensor in stored.values())
    head = load_file(out / "draft" / "target" / "model.safetensors")["lm_head.weight"].numel()
    assert Manifest.read(out).parts["draft"].weight_bytes == 2 * (counted + head)
