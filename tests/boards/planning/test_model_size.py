"""Sizes from config.json against stored files and loaded shards."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from kits.block_drafters import published_block
from kits.draft_heads import published_eagle3
from kits.family_checkpoints import family_model
from kits.mtp_layers import with_mtp
from kits.tiny_model_dir import tiny_eagle3, tiny_model_dir
from kits.tiny_models import tiny_llama, tiny_model
from safetensors.torch import load_file, save_file

from flowspec_edge.boards.planning.model_parts import shipped_parts
from flowspec_edge.boards.planning.model_size import PlanDtype, model_bytes
from flowspec_edge.boards.planning.read_parts import read_shipped
from flowspec_edge.d0.models import DraftModels
from flowspec_edge.drafting.block.formats import load_block_head
from flowspec_edge.drafting.eagle.eagle2 import EagleDrafter, load_head
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.catalogue import known_models
from flowspec_edge.model.config import load_config
from flowspec_edge.model.manifest import CacheBits, HeadBits
from flowspec_edge.sharding.job import run
from flowspec_edge.sharding.plan import make_plan, recipe_for
from flowspec_edge.sharding.source import open_source
from flowspec_edge.stage.layers.kv_cache import KVArena
from flowspec_edge.stage.quant.schemes import scheme
from flowspec_edge.stage.quant.sizes import GROUPS, Packed, matrix_bytes
from flowspec_edge.stage.shard import load_lm_head, load_shard
from flowspec_edge.strategies.params import Params
from microbench.shapes.memory import FIRST, footprint

LLAMA_2_7B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
              "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=3)


def checkpoint(path: Path, family: str) -> Path:
    extra: dict[str, dict[str, Any]] = {"qwen3": {"tie_word_embeddings": True},
                                        "mistral": {"sliding_window": None},
                                        "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2,
                                                      "moe_intermediate_size": 48},
                                        "mixtral": {"num_local_experts": 3}}
    return tiny_model(family, path, layers=3, **extra.get(family, {}))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_equals_the_bytes_of_a_loaded_shard(tmp_path: Path, family: str, dtype: PlanDtype) -> None:
    path = checkpoint(tmp_path, family)
    size = model_bytes(str(path), dtype)
    assert load_shard(path, 0, 3, dtype).nbytes == size.layer
    assert load_shard(path, 1, 3, dtype).nbytes == size.layer
    assert load_shard(path, 2, 3, dtype).nbytes == size.layer + size.norm
    assert load_shard(path, 0, 1, dtype).nbytes == size.target_weights
    assert load_lm_head(path, dtype).nbytes == size.lm_head


def test_equals_the_bytes_of_the_files(model: Path) -> None:
    size = model_bytes(str(model), "fp32")
    file = model / "target" / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    embeddings = size.lm_head  # which stay in the file
    assert file.stat().st_size - header == size.target_weights + embeddings + size.lm_head
    head = load_head(model / "eagle2", None, torch.float32)
    assert sum(p.nbytes for p in head.parameters()) == size.draft + head.embed_tokens.weight.nbytes
    assert size.from_weights
    assert not size.draft_estimated
    assert size.d0_weights == size.lm_head + size.draft


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_row_equals_what_the_cache_allocates(model: Path, dtype: PlanDtype) -> None:
    shard = load_shard(model / "target", 0, 1, dtype)
    arena = KVArena(range(3), shard.config.num_key_value_heads, shard.config.head_dim, shard.dtype, shard.device,
                    rows=100)
    assert arena.nbytes == 3 * 100 * model_bytes(str(model), dtype).kv_row


def test_int4_packs_the_layers_matrices_and_nothing_else(tmp_path: Path) -> None:
    path = tiny_model("qwen2", tmp_path / "model", layers=2, hidden=192)  # 192 is a group and a half
    whole, packed = model_bytes(str(path), "bf16"), model_bytes(str(path), "int4", "16bit")
    source = open_source(str(path))
    run(make_plan(source, recipe_for(source, "int4", lm_head="16bit"), [(0, 1), (1, 2)]), tmp_path / "cut")
    first, last = (load_shard(tmp_path / "cut", i, 2, "bf16").nbytes for i in (0, 1))
    assert first == packed.layer
    assert last == packed.layer + packed.norm
    assert packed.layer < whole.layer / 3
    for part in ("norm", "lm_head", "draft", "kv_row", "draft_kv_row"):
        assert getattr(packed, part) == getattr(whole, part)
    assert packed.bytes_per_value == 2


@pytest.mark.parametrize(("family", "experts"), [("qwen3.5", 0), ("qwen3.5-moe", 6)])
def test_a_models_own_mtp_layer_is_its_draft_head(tmp_path: Path, family: str, experts: int) -> None:
    """A level's ten rows leave experts unread: as many as when each row draws its two of six."""
    target = with_mtp(family_model(family, tmp_path / "target"))
    size = model_bytes(str(target), "fp32")
    layer = {name: tensor.nbytes for name, tensor in load_file(target / "model.safetensors").items()
             if name.startswith("mtp.")}
    assert size.draft == sum(layer.values())
    assert (size.draft_lm_head, size.draft_estimated) == (size.lm_head, False)
    own = sum(nbytes for name, nbytes in layer.items() if ".experts." in name)
    chance = random.Random(1)
    unread = [experts - len({e for _ in range(10) for e in chance.sample(range(experts), 2)})
              for _ in range(20_000 if experts else 0)]
    expected = own * sum(unread) / len(unread) / experts if experts else 0
    assert size.draft_unread == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("bits", ["16bit", "int8", "int4"])
def test_bytes_of_d0_equal_what_it_loads(tmp_path: Path, bits: HeadBits) -> None:
    path = tiny_model_dir(tmp_path / "model", layers=3, vocab=304)
    for other in ("draft-lm", "spd"):
        shutil.rmtree(path / other)
    size = model_bytes(str(path), "int4", bits)
    source = open_source(str(path))
    manifest = run(make_plan(source, recipe_for(source, "int4", lm_head=bits), [(0, 3)]), tmp_path / "cut")
    models = DraftModels(tmp_path / "cut", "bf16")
    assert models._lm_head.head.nbytes == size.lm_head
    drafter = models._drafter("eagle2", Params())
    assert isinstance(drafter, EagleDrafter)
    held = [t for name, t in (*drafter._head.named_parameters(), *drafter._head.named_buffers())
            if "embed" not in name and "rotary" not in name]
    assert sum(t.nbytes for t in held) == size.draft
    assert manifest.part("draft").weight_bytes == size.lm_head + size.draft


@pytest.mark.slow
def test_a_real_stage_of_qwen2_7b(tmp_path: Path) -> None:
    """Two of its layers and the whole vocabulary, 1.1 GB of embeddings that must not be in memory: written
    with random bits, loaded by a process of its own. On a CPU; kernels for GPUs pack into as many bytes."""
    found = footprint("qwen2-7b", [FIRST], tmp_path, layers=2)
    assert found.planned > 250e6
    assert found.tensor_bytes == pytest.approx(found.planned, rel=0.001)
    assert found.anonymous - found.free == pytest.approx(found.planned, abs=25e6)
    # What a process needs whatever the model is in the plan's "process MB".
    assert found.peak < found.planned * 1.05 + 60e6
    assert found.cached < 20e6


def test_without_weights_a_config_is_enough(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "model" / "target"
    bare.mkdir(parents=True)
    shutil.copy(model / "target" / "config.json", bare)
    with_weights, without = model_bytes(str(model), "fp16"), model_bytes(str(bare), "fp16")
    assert not without.from_weights
    assert without.draft_estimated
    parts = ("layers", "layer", "norm", "lm_head", "kv_row", "hidden_width")
    assert [getattr(without, p) for p in parts] == [getattr(with_weights, p) for p in parts]
    assert model_bytes(str(bare / "config.json"), "fp16") == without
    assert model_bytes(str(bare.parent), "fp16").layer == without.layer


def test_a_seven_billion_model_before_it_is_downloaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    size = model_bytes(str(tmp_path), "fp16")
    # The published checkpoint has 6 738 415 616 parameters.
    assert size.target_weights + 2 * size.lm_head == 2 * 6_738_415_616
    assert size.layer == 2 * 202_383_360
    assert size.kv_row == 2 * 2 * 4096
    # A layer without the norm in front of the attention, and fc from 2 H to H with a bias.
    assert size.draft == 2 * (202_383_360 - 4096 + 2 * 4096 * 4096 + 4096)
    assert model_bytes(str(tmp_path), "int4").layer == (202_383_360 - 2 * 4096) * 17 // 32 + 2 * 2 * 4096


def test_weights_that_are_not_the_configs(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", layers=2)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))
    with pytest.raises(FlowspecError, match=r"mlp\.\w+_proj\.weight has shape .* config.json asks for"):
        model_bytes(str(path), "fp16")
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(FlowspecError, match=r"no tensor model\.layers\.2\..* incomplete"):
        model_bytes(str(path), "fp16")


def test_the_checkpoint_of_an_untied_model_needs_its_lm_head(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", layers=1)
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items() if name != "lm_head.weight"}
    save_file(tensors, file)
    with pytest.raises(FlowspecError, match=r"no tensor lm_head\.weight"):
        model_bytes(str(path), "fp16")


def test_models_that_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model 'nowhere': not a directory, and no name in"):
        model_bytes("nowhere", "fp16")
    with pytest.raises(UsageError, match="is an empty directory: give the directory of"):
        model_bytes(str(tmp_path), "fp16")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_2_7B, "model_type": "gpt2"}))
    with pytest.raises(UsageError, match="stages cannot run 'gpt2' models"):
        model_bytes(str(tmp_path), "fp16")
    quantised = {**LLAMA_2_7B, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(UsageError, match="is a quantised checkpoint"):
        model_bytes(str(tmp_path), "fp16")


def test_a_head_of_either_kind_is_counted(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path / "model", layers=6)
    shutil.rmtree(path / "eagle2")
    tiny_eagle3(path, drafted=40)
    size = model_bytes(str(path), "fp32")
    stored = load_file(path / "eagle3" / "model.safetensors")
    assert size.draft == sum(t.nbytes for name, t in stored.items() if t.is_floating_point()
                             and name != "embed_tokens.weight")
    assert not size.draft_estimated


@pytest.mark.parametrize("drafted", [None, 48])
def test_a_block_drafter_is_counted(tmp_path: Path, drafted: int | None) -> None:
    """With keys and values in each of its layers; it may rank by its own lm_head."""
    target = tiny_llama(tmp_path / "model" / "target", layers=6, vocab=64)
    width = load_config(target).hidden_size
    facts = {"drafted": drafted, "form": "speculators"} if drafted else {}
    published_block(tmp_path / "model" / "dflash", width=width, vocabulary=64, layers=3, ids=(1, 4), **facts)
    size = model_bytes(str(tmp_path / "model"), "fp32")
    head = load_block_head(tmp_path / "model" / "dflash", torch.zeros(64, width), torch.float32, 6)
    held = sum(p.nbytes for name, p in head.named_parameters() if not name.startswith("embed_tokens"))
    assert (size.draft, size.draft_lm_head) == (held, 0 if drafted else size.lm_head)
    assert size.draft_kv_row == 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    assert not size.draft_estimated


def test_a_candidate_head_for_a_large_vocabulary() -> None:
    """Qwen3.6-27B's MTP layer ranks by an lm_head of 248,320 x 5,120 in int8, in groups of 128."""
    whole, narrow = (model_bytes("qwen3.6-27b", "int4", candidates=count) for count in (0, 128))
    assert model_bytes("qwen3.6-27b", "int4") == narrow
    assert (whole.candidates, narrow.candidates) == (0, 128)
    row = 5120 + 5120 // 128 * 4
    assert whole.draft_lm_head == whole.lm_head == 248_320 * row
    assert narrow.draft_lm_head == 10 * 128 * row * (1 + 2 * 6)  # of ten nodes, from six pieces
    # The large factor in int4, the small one in 16 bits.
    assert narrow.draft - whole.draft == 248_320 * (128 + 2 * 4) + 256 * 5120 * 2
    assert model_bytes("llama-2-7b", "int4").candidates == 0  # a small vocabulary
    assert model_bytes("qwen3-8b", "int4", draft="head").candidates == 0  # its EAGLE-3 head ranks 32,000 tokens


def test_an_eagle4_heads_pass_reads_some_rows_of_its_lm_head(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "model", layers=8, hidden=64)
    vocabulary = int(load_config(target).vocab_size)
    published_eagle3(tmp_path / "model" / "eagle3", 0, 64, vocabulary, fc_norm=True, norm_output=True, form="eagle4",
                     factor=8, num_candidates=16)
    size = model_bytes(str(tmp_path / "model"), "fp32")
    assert size.planned.kind.name == "eagle3"
    assert size.draft_unread == max(0, vocabulary * 64 * 4 - 10 * 16 * 64 * 4 * 3)


def test_a_sharded_model_cannot_be_planned(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "model", layers=2)
    source = open_source(str(path))
    run(make_plan(source, recipe_for(source, "fp16"), [(0, 1), (1, 2)]), tmp_path / "cut")
    with pytest.raises(UsageError, match="cut is sharded already: give the checkpoint"):
        model_bytes(str(tmp_path / "cut"), "fp16")


def test_the_shipped_parts_of_known_models_are_those_that_are_read() -> None:
    """After a change of the catalogue: python -m flowspec_edge.boards.planning.read_parts."""
    shipped = shipped_parts()
    assert shipped.keys() == known_models().keys()
    assert {name for name in shipped if read_shipped(name) != shipped[name]} == set()


@pytest.mark.parametrize("kind", ["llama-2-7b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3.6-27b"])
@pytest.mark.parametrize("dtype", get_args(PlanDtype))
def test_a_known_model_has_the_size_of_its_config(tmp_path: Path, kind: str, dtype: PlanDtype) -> None:
    """Known models' sizes come from parts.json, and a config.json's through transformers."""
    path = tmp_path / kind / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(known_models()[kind].config))
    for bits in get_args(HeadBits):
        for kept in get_args(CacheBits):
            for draft in ("head", "ngram"):
                known = model_bytes(kind, dtype, bits, kept, draft)
                draft_kind = known.planned.kind
                if draft == "head" and known.planned.origin == "published" and draft_kind.name != "eagle2":
                    continue  # of a config.json none is known
                read = model_bytes(str(path), dtype, bits, kept, draft)
                assert replace(known, planned=read.planned) == replace(read, name=kind)


def test_matrices_take_what_their_scheme_stores() -> None:
    for rows, columns in ((64, 256), (48, 96), (5, 256), (16, 33), (32, 2880)):
        for kind in get_args(Packed):
            for group in GROUPS:
                how = scheme(kind, group)
                wanted = how.nbytes(rows, columns) if how.fits(rows, columns) else rows * columns * 2
                assert matrix_bytes(rows, columns, 2, kind, group) == wanted, (rows, columns, kind, group)
