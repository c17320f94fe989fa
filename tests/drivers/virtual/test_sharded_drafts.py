"""Requests on sharded models whose draft device holds no more than its draft models need."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from kits.sharded_models import cut
from kits.tiny_model_dir import tiny_eagle3, tiny_model_dir
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import FlowspecError
from flowspec_edge.strategies.params import Params

PROMPT = [5, 17, 42, 3, 3, 58, 11]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), layers=3)
    tiny_eagle3(path)
    return path


def truth(model: Path, new: int) -> list[int]:
    whole = AutoModelForCausalLM.from_pretrained(model / "target")
    ids = whole.generate(torch.tensor([PROMPT]), max_new_tokens=new, do_sample=False, eos_token_id=None)
    return list(ids[0, len(PROMPT):].tolist())


@pytest.mark.parametrize(("part", "kind"), [
    ("eagle2", "eagle2"), ("eagle3", "eagle3"), ("draft-lm", "lm"), ("", "ngram")])
def test_each_draft_alone(model: Path, tmp_path: Path, part: str, kind: str) -> None:
    out = tmp_path / "out"
    cut(model / "target", out, dtype="fp32", split=(1, 2), drafts=[model / part] if part else [])
    stored = load_file(out / "draft" / "target" / "model.safetensors")
    assert ("model.embed_tokens.weight" in stored) == (kind == "eagle3")
    cluster = VirtualCluster(out, 2, load_profile("paper-7b"), "fp32")
    found = cluster.generate(Request(PROMPT, "flowspec", 8, params=Params(draft=kind)))  # type: ignore[arg-type]
    assert list(found.tokens) == truth(model, 8)


def test_d0_checks_its_part(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cut(model / "target", out, dtype="fp32", drafts=[model / "eagle2"])
    weights = out / "draft" / "eagle2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(FlowspecError, match=r"eagle2/model\.safetensors has been altered"):
        VirtualCluster(out, 2, load_profile("paper-7b"), "fp32").generate(Request(PROMPT, "flowspec", 8))


def test_a_head_of_another_vocabulary_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    """The request gets one line; the next one, with other drafts, is served by the same D0."""
    other = Path(shutil.copytree(model, tmp_path / "copy"))
    shutil.rmtree(other / "eagle2")
    shutil.copytree(tiny_model_dir(tmp_path / "foreign", layers=1, vocab=301) / "eagle2", other / "eagle2")
    cluster = VirtualCluster(other, 2, load_profile("paper-7b"), "fp32")
    for _ in range(2):
        with pytest.raises(FlowspecError, match=r"eagle2.*vocabulary .* 301 tokens, the target's 300") as no:
            cluster.generate(Request(PROMPT, "flowspec", 8, params=Params(draft="eagle2")))
        assert "\n" not in str(no.value)
    found = cluster.generate(Request(PROMPT, "flowspec", 8, params=Params(draft="ngram")))
    assert list(found.tokens) == truth(model, 8)
