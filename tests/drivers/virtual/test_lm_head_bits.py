"""lm_head and EAGLE heads in 8 and 4 bits: the blocks of rows, and tokens that are those of transformers."""

from __future__ import annotations

import json
import shutil
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.cases import DISTINCT
from kits.tiny_model_dir import tiny_model_dir
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.lab.bench.weight_loss import weight_losses
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.manifest import HeadBits
from flowspec_edge.model.opened import OpenModel, OpenPart
from flowspec_edge.model.weights.files import WeightFiles
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.sharding.job import run
from flowspec_edge.sharding.plan import make_plan, ranges_for, recipe_for
from flowspec_edge.sharding.source import open_source
from flowspec_edge.stage import output_head
from flowspec_edge.stage.quant.base import QuantLinear
from flowspec_edge.stage.quant.schemes import head_scheme
from flowspec_edge.stage.quant.schemes import scheme as quantised
from flowspec_edge.stage.shard import load_lm_head
from flowspec_edge.strategies.registry import STRATEGIES

PROMPT, NEW, VOCABULARY = [5, 17, 42, 3, 3, 58, 11], 10, 4112  # of five slices of rows, the last a short one
SAMPLED = Sampling(1.0, seed=4)
PIPELINED = [name for name, strategy in STRATEGIES.items() if strategy.parallelism == "pipeline"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bits")
    tiny_model_dir(path / "model", layers=2, vocab=VOCABULARY)
    return path


@cache
def sharded(base: Path, bits: HeadBits, dtype: Any = "fp32") -> Path:
    source, out = open_source(str(base / "model")), base / f"{dtype}-{bits}"
    run(make_plan(source, recipe_for(source, dtype, None, "fp32", bits), ranges_for(2, 2, None)), out)
    return out


@cache
def oracle(base: Path, bits: HeadBits) -> Any:
    """transformers' model, with the matrix that the stored one stands for."""
    model = AutoModelForCausalLM.from_pretrained(base / "model" / "target", dtype=torch.float32)
    scheme = head_scheme(bits)
    assert scheme
    stored = load_file(sharded(base, bits) / "draft" / "target" / "model.safetensors")
    model.lm_head.weight = torch.nn.Parameter(scheme.dequantise(
        {name.removeprefix("lm_head."): tensor for name, tensor in stored.items() if "lm_head" in name}))
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False)


@pytest.mark.parametrize("bits", ["16bit", "int8", "int4"])
def test_blocks_of_rows_are_one_matrix(base: Path, bits: HeadBits, monkeypatch: pytest.MonkeyPatch) -> None:
    one = output_head.load_output_head(sharded(base, bits), "fp32")
    monkeypatch.setattr(output_head, "HEAD_BLOCK_BYTES", 1)  # a slice of rows each
    several = output_head.load_output_head(sharded(base, bits), "fp32")
    assert (len(one.blocks), len(several.blocks)) == (1, 5)
    assert one.vocabulary == several.vocabulary == VOCABULARY
    assert one.nbytes == several.nbytes
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(several(x), one(x), rtol=1e-6, atol=1e-6)
    if bits == "16bit":
        torch.testing.assert_close(one(x), x @ load_lm_head(base / "model" / "target", "fp32").T)
    else:
        torch.testing.assert_close(one(x).double(), x.double() @ oracle(base, bits).lm_head.weight.double().T,
                                   rtol=1e-5, atol=1e-5)


@cache
def cluster(base: Path, bits: HeadBits) -> VirtualCluster:
    return VirtualCluster(sharded(base, bits), 2, load_profile("paper-7b"))


@cache
def expected(base: Path, bits: HeadBits) -> tuple[list[int], list[int]]:
    """transformers' own greedy text, which is also plain decoding's; and a sampled one of that."""
    ids, plain = torch.tensor([PROMPT]), PlainDecoder(sharded(base, bits))
    text = oracle(base, bits).generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                       max_new_tokens=NEW)[0, len(PROMPT):].tolist()
    assert plain.generate(PROMPT, NEW, Sampling())[0] == text
    return text, plain.generate(PROMPT, NEW, SAMPLED)[0]


@pytest.mark.parametrize(("bits", "name"), [
    pytest.param(bits, name, marks=() if name in DISTINCT else pytest.mark.soak)
    for bits, name in zip(cycle(("int8", "int4")), PIPELINED, strict=False)])
def test_tokens_are_those_of_generate(base: Path, bits: HeadBits, name: str) -> None:
    for sampling, tokens in zip((Sampling(), SAMPLED), expected(base, bits), strict=True):
        assert cluster(base, bits).generate(Request(PROMPT, name, NEW, sampling)).tokens == tokens


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_an_eagle_head_has_four_bits(base: Path, bits: HeadBits) -> None:
    models = DraftModels(sharded(base, bits))
    head = models._drafter("eagle2", Request(PROMPT).params)._head  # type: ignore[attr-defined]
    scheme = quantised("int4")
    stored = load_file(base / "model" / "eagle2" / "model.safetensors")
    linears = {name: module for name, module in head.named_modules()
               if isinstance(module, QuantLinear) and module.scheme.kind == "int4"}
    # fc, four of the attention, and two of the MLP, whose gate and up are one matrix.
    assert len(linears) == 7
    for name, module in linears.items():
        path, joined = name.rpartition(".qkv_proj.parts.")[0], name.rpartition(".")[2]
        names = ([f"{path}.{'qkv'[int(joined)]}_proj"] if path else
                 [name.replace("gate_up", part) for part in ("gate", "up")] if "gate_up" in name else [name])
        weight = torch.cat([stored[f"{name}.weight"] for name in names])
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1))
        expected = x.double() @ scheme.dequantise(scheme.quantise(weight)).double().T
        expected += torch.cat([stored[f"{name}.bias"] for name in names]) if f"{names[0]}.bias" in stored else 0
        torch.testing.assert_close(module(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_the_loss_is_that_of_transformers_logits(base: Path, bits: HeadBits) -> None:
    texts = [PROMPT, [9, 8, 7, 6, 250, 251, 252, 9, 9], [300] * 70]
    true = AutoModelForCausalLM.from_pretrained(base / "model" / "target", dtype=torch.float32).eval()
    divergence = own = reference = same = tokens = 0.0
    for text in texts:
        with torch.inference_mode():
            p, q = (torch.log_softmax(model(torch.tensor([text])).logits[0, :-1].double(), -1)
                    for model in (true, oracle(base, bits)))
        rows = range(len(text) - 1)
        divergence += float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True))
        own -= float(q[rows, text[1:]].sum())
        reference -= float(p[rows, text[1:]].sum())
        same += float((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += len(rows)
    layers, whole = weight_losses(OpenModel(sharded(base, bits)), OpenModel(base / "model"), texts)
    assert (layers.weights, whole.weights) == ("layers fp32", f"layers fp32, lm_head {bits}")
    assert layers.kl == pytest.approx(0, abs=1e-9)
    assert whole.tokens == tokens
    assert whole.kl == pytest.approx(divergence / tokens, rel=1e-3, abs=1e-8)
    assert whole.same_best_token == pytest.approx(same / tokens)
    for found, expected in ((whole.perplexity, own), (whole.reference_perplexity, reference),
                            (layers.perplexity, reference)):
        assert found == pytest.approx(float(torch.tensor(expected / tokens).exp()), rel=1e-4)


def test_four_bit_layers_have_an_eight_bit_lm_head_unless_told(base: Path) -> None:
    source = open_source(str(base / "model"))
    heads = [recipe_for(source, dtype).lm_head for dtype in ("fp16", "int4", "nf4")]  # type: ignore[arg-type]
    assert [head and head.kind for head in heads] == [None, "int8", "int8"]
    assert recipe_for(source, "int4", lm_head="16bit").lm_head is None


def test_a_vocabulary_that_no_kernel_takes_stays_in_16_bits(tmp_path: Path) -> None:
    tiny_model_dir(tmp_path / "odd", layers=2, vocab=300)
    source = open_source(str(tmp_path / "odd"))
    assert recipe_for(source, "int4").lm_head is None
    with pytest.raises(UsageError, match=r"--lm-head int8 cannot hold an lm_head of 300 x 64: .* of 16"):
        recipe_for(source, "int4", lm_head="int8")


@pytest.mark.parametrize("damage", ["scale", "dtype", "rows"])
def test_a_damaged_head_is_refused(base: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(OpenModel(sharded(base, "int4")).target, copy)
    tensors = load_file(copy / "model.safetensors")
    message = {"scale": "lm_head.scales holds NaN", "dtype": "lm_head.zeros is stored as torch.float16",
               "rows": r"lm_head.qweight has shape \[4096, 32\]"}[damage]
    if damage == "scale":
        tensors["lm_head.scales"][7] = float("nan")
    elif damage == "dtype":
        tensors["lm_head.zeros"] = tensors["lm_head.zeros"].half()
    else:
        tensors["lm_head.qweight"] = tensors["lm_head.qweight"][:4096].clone()
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(FlowspecError, match=message):
        output_head.read_output_head(OpenPart(copy, WeightFiles()), "fp32", "cpu", head_scheme("int4"))


def test_tied_embeddings_keep_their_16_bits(tmp_path: Path) -> None:
    tiny_model_dir(tmp_path / "model", layers=2, vocab=304)
    target = tmp_path / "model" / "target"
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = {name: tensor for name, tensor in load_file(target / "model.safetensors").items()
               if name != "lm_head.weight"}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    source, out = open_source(str(tmp_path / "model")), tmp_path / "cut"
    run(make_plan(source, recipe_for(source, "fp32", lm_head="int8"), ranges_for(2, 2, None)), out)
    embedding = load_file(out / "stage-1" / "embed.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"])
    plain, scheme = PlainDecoder(out), head_scheme("int8")
    assert scheme
    head = scheme.dequantise(scheme.quantise(embedding))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(plain.model.lm_head(x), x @ head.T, rtol=1e-5, atol=1e-5)
    cluster = VirtualCluster(out, 2, load_profile("paper-7b"))
    expected = plain.generate(PROMPT, NEW, Sampling())[0]
    assert cluster.generate(Request(PROMPT, "flowspec", NEW)).tokens == expected
