"""Models in GGUF files against the checkpoints that they were made of, against transformers, and against gguf."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from kits.cluster_fixtures import tiny_head
from kits.gguf_files import FAMILIES, as_gguf, dequantised, tiny_gguf
from kits.sharded_models import all_tensors, cut
from kits.stages import Book, Oracle, assert_rows, engines, through
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flowspec_edge import Cluster
from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.gguf.config import llama3_factors
from flowspec_edge.model.gguf.header import read_header
from flowspec_edge.model.opened import OpenModel, resolve_model
from flowspec_edge.stage.quant.gguf_blocks import repacked
from flowspec_edge.stage.quant.schemes import scheme
from flowspec_edge.strategies.draft_choice import require_draft, with_a_draft
from flowspec_edge.strategies.registry import strategy_class
from flowspec_edge.strategies.tree_strategy import TreeParameters

FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size", "eos_token_id",
          "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
          "norm_topk_prob", "hidden_act", "tie_word_embeddings", "layer_types", "sliding_window",
          "query_pre_attn_scalar", "hidden_activation")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def all_in(kind: Kind) -> Callable[[str], Kind]:
    return lambda name: kind


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_checkpoint_that_it_was_made_of(tmp_path: Path, family: str) -> None:
    made, file = tiny_gguf(family, tmp_path, all_in(Kind.F32), vocab=112)
    found, meant = resolve_model(file), OpenModel(made)
    assert file.stat().st_size < found.size < file.stat().st_size + 100_000
    ours, theirs = found.parsed_config.to_dict(), meant.parsed_config.to_dict()
    assert {name: ours.get(name) for name in FIELDS} == {name: theirs.get(name) for name in FIELDS}
    tensors, checkpoint = meant.checkpoint(), found.checkpoint()
    assert set(checkpoint.names) == set(tensors.names)
    values = sum(tensor.numel() for tensor in tensors.tensors(tensors.names).values())
    assert found.weight_values == values  # serve's need of memory is counted from it
    for name in tensors.names:
        whole, file_tensors = tensors.tensors([name])[name], checkpoint.file_of(name)
        assert torch.equal(file_tensors.read(name), whole), name
        lo, hi = min(5, len(whole)), min(43, len(whole))
        assert torch.equal(file_tensors.read(name, lo, hi), whole[lo:hi]), name
    one, other = (AutoTokenizer.from_pretrained(path) for path in (found.target, made))
    assert one("<eos>a b  c(x): 12\n").input_ids == other("<eos>a b  c(x): 12\n").input_ids


@pytest.mark.parametrize(("family", "kind"), [("llama", Kind.Q8_0), ("llama", Kind.Q4_1), ("gemma3_text", Kind.Q5_0)])
def test_texts_are_those_of_transformers(tmp_path: Path, family: str, kind: Kind) -> None:
    made, file = tiny_gguf(family, tmp_path, all_in(kind), vocab=112)
    theirs = AutoModelForCausalLM.from_pretrained(dequantised(made, tmp_path / "same", kind), dtype=torch.float32)
    tiny_head(tmp_path / "eagle2", vocab=112)  # beside the file
    prompt = torch.tensor([[5, 17, 33, 9]])
    wanted = theirs.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    with Cluster.virtual(file, stages=2, dtype="fp32") as cluster:
        request = replace(cluster.request(prompt[0].tolist(), max_new_tokens=24), stop_ids=frozenset())
        answer = cluster.generate(request)
        assert list(answer.tokens) == wanted[0, 4:].tolist()
        assert cluster.plain(request) == list(answer.tokens)


def random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Blocks of any codes, with scales of common sizes."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(kind))
    blocks = random.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    scales = 2 if kind == Kind.Q4_0 else 4
    blocks[..., :scales] = random.uniform(-.1, .1, (*blocks.shape[:2], scales // 2)).astype("<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q4_K])
def test_blocks_are_repacked_to_within_bfloat16(kind: Kind) -> None:
    blocks = random_blocks(kind, 48, 512)
    wanted = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    stored = repacked(kind.name, torch.from_numpy(blocks))
    how = scheme("int4", 32)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()} == how.stored(48, 512)
    step = stored["scales"].float().abs().repeat_interleave(32, 1)
    middle = stored["zeros"].float().abs().repeat_interleave(32, 1)
    assert ((how.dequantise(stored) - wanted).abs() <= (8 * step + middle) * 2**-8 + 1e-6).all()


OTHER_TYPES = {"token_embd.weight": Kind.Q8_0, "output.weight": Kind.Q8_0, "blk.1.ffn_down.weight": Kind.Q8_0,
               "blk.0.attn_v.weight": Kind.Q5_0, "blk.1.ffn_up.weight": Kind.Q5_1, "blk.0.ffn_up.weight": Kind.F16,
               "blk.1.attn_q.weight": Kind.BF16}


def mixed(name: str) -> Kind:
    """As files of the kind Q4_K_M mix types."""
    return OTHER_TYPES.get(name, Kind.Q4_1)


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q5_K, Kind.Q6_K])
def test_other_blocks_become_int8(kind: Kind) -> None:
    """Uniform errors of a step of 119 in the largest weight of 128; the largest of a bell's is 2.9 of its rms."""
    values = np.random.default_rng(1).normal(size=(48, 512)).astype(np.float32)
    exact = torch.from_numpy(gguf.quants.dequantize(quantised(values, kind), kind))
    how = scheme("int8")
    assert (how.dequantise(how.quantise(exact)) - exact).norm() < .009 * exact.norm()


def quantised(values: np.ndarray[Any, np.dtype[np.float32]], kind: Kind) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """In blocks; of the types that the package does not write, random ones with the spread of ``values``."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:  # the package reads this type, and does not write it
        blocks = np.random.default_rng(2).integers(0, 256, (len(values), values.shape[1] // 256,
                                                            gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        half = np.frombuffer(np.float16(.01).tobytes(), np.uint8)
        if kind == Kind.Q6_K:
            blocks[..., -2:] = half
            blocks[..., -18:-2] = 20  # the scales
        else:
            blocks[..., :4] = np.tile(half, 2)
        return blocks.reshape(len(values), -1)


def test_shards_keep_the_files_own_4_bits(tmp_path: Path) -> None:
    _, file = tiny_gguf("llama", tmp_path, mixed, vocab=112)
    manifest = cut(file, tmp_path / "shards")
    assert manifest.quantisation is not None
    assert manifest.lm_head is not None
    assert (manifest.dtype, manifest.quantisation.group, manifest.lm_head.kind) == ("int4", 32, "int8")
    assert set(manifest.quantisation.int8) == {"model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj",
                                               "model.layers.1.mlp.down_proj"}
    assert set(manifest.quantisation.kept) == {"model.layers.0.mlp.up_proj.weight",
                                               "model.layers.1.self_attn.q_proj.weight"}
    assert manifest.stored == "int4 and int8, lm_head int8"
    stored = read_header(file)
    first = OpenModel(tmp_path / "shards" / "stage-1").checkpoint()
    name = "model.layers.0.self_attn.q_proj"
    codes = {part: first.tensors([f"{name}.{part}"])[f"{name}.{part}"] for part in ("qweight", "scales", "zeros")}
    wanted = resolve_model(file).checkpoint().tensors([f"{name}.weight"])[f"{name}.weight"]
    assert (scheme("int4", 32).dequantise(codes) - wanted).norm() < .004 * wanted.norm()
    assert {tensor.type.name for tensor in stored.tensors} == {"F32", "Q4_1", *(kind.name for kind in
                                                                               OTHER_TYPES.values())}
    size = model_bytes(str(file), "int4")
    assert size.head_bits == "int8"
    parts = [manifest.parts[f"stage-{number}"].weight_bytes for number in (1, 2)]
    assert size.layer == max(parts[0], parts[1] - size.norm)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rows_of_shards_are_those_of_the_stored_weights(tmp_path: Path, family: str) -> None:
    """int4, int8 and 16 bits in one layer, q beside v and gate beside up, against transformers."""
    made, file = tiny_gguf(family, tmp_path, mixed, vocab=112)
    manifest = cut(file, tmp_path / "shards", compute="fp32")
    chain = engines(tmp_path / "shards", 2)
    book = Book()
    _, output = through(chain, book.text([5, 17, 33, 9, 54, 2, 80]))
    assert_rows(output, book, Oracle(as_stored(made, tmp_path / "shards", tmp_path / "same")))
    for engine, number in zip(chain, (1, 2), strict=True):
        assert engine.model.nbytes == manifest.parts[f"stage-{number}"].weight_bytes


def as_stored(made: Path, shards: Path, out: Path) -> Path:
    """The checkpoint with the values that the shards' matrices stand for."""
    shutil.copytree(made, out)
    stored = all_tensors(shards)
    found = {name: tensor.float() for name, tensor in stored.items() if name.endswith("weight") and "qw" not in name}
    for prefix in {name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")}:
        parts = {part: stored[name] for part in ("qweight", "scales", "zeros")
                 if (name := f"{prefix}.{part}") in stored}
        how = scheme("int4", 32) if "zeros" in parts else scheme("int8")
        found[f"{prefix}.weight"] = how.dequantise(parts)
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_a_file_without_4_bits_is_one_in_16(tmp_path: Path) -> None:
    made, file = tiny_gguf("llama", tmp_path, lambda name: Kind.Q4_1 if name == "token_embd.weight" else Kind.Q8_0,
                        vocab=112)
    assert cut(file, tmp_path / "shards").quantisation is None
    packed, anew = (model_bytes(path, "int4").layer for path in (str(file), str(made)))
    assert packed == anew  # of a checkpoint


def test_a_file_can_be_dequantised_or_quantised_anew(tmp_path: Path) -> None:
    made, file = tiny_gguf("llama", tmp_path, all_in(Kind.Q8_0), vocab=112)
    assert cut(file, tmp_path / "plain").dtype == "fp16"
    other = as_gguf(made, tmp_path / "four.gguf", all_in(Kind.Q4_0), {})
    assert cut(other, tmp_path / "fp32", dtype="fp32").quantisation is None
    anew = cut(file, tmp_path / "anew", dtype="int4", group=64).quantisation
    assert anew is not None
    assert anew.group == 64
    with pytest.raises(UsageError, match="is quantised already, in groups of 32"):
        cut(other, tmp_path / "none", dtype="int4", group=64)


def test_a_split_file_is_one_model(tmp_path: Path) -> None:
    made, file = tiny_gguf("llama", tmp_path, all_in(Kind.F32), vocab=112)
    reader = gguf.GGUFReader(file)
    parts = [tmp_path / "parts" / f"tiny-{number + 1:05d}-of-00002.gguf" for number in range(2)]
    parts[0].parent.mkdir()
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(str(part), "llama")
        for field in [] if number else [f for f in reader.fields.values() if not f.name.startswith("GGUF.")]:
            if field.name != "general.architecture":
                writer.add_key_value(field.name, field.contents(), field.types[0],
                                     field.types[-1] if len(field.types) > 1 else None)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for given in (parts[0], parts[1], parts[0].parent):
        checkpoint = resolve_model(given).checkpoint()
        for name, tensor in OpenModel(made).checkpoint().tensors(checkpoint.names).items():
            assert torch.equal(checkpoint.tensors([name])[name], tensor)
    parts[1].unlink()
    with pytest.raises(FlowspecError, match=r"tiny-00002-of-00002\.gguf is missing: the model is split into 2"):
        resolve_model(parts[0])


def test_what_lies_beside_a_file_belongs_to_the_model(tmp_path: Path, model: Path) -> None:
    made, file = tiny_gguf("llama", tmp_path, all_in(Kind.F32), vocab=112)
    home = tmp_path / "files"
    home.mkdir()
    file.rename(home / "tiny.gguf")
    (home / "eagle2").symlink_to(model / "eagle2")
    (home / "tokenizer.json").write_bytes((made / "tokenizer.json").read_bytes())
    found = resolve_model(home)
    assert found.name == "tiny"
    assert [kind.name for kind in found.drafts] == ["eagle2"]
    assert (found.target / "tokenizer.json").samefile(home / "tokenizer.json")
    (home / "other.gguf").touch()
    with pytest.raises(UsageError, match=r"several GGUF files: give one of them: other\.gguf, tiny\.gguf"):
        resolve_model(home)


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    made, file = tiny_gguf("llama", tmp_path, all_in(Kind.F32), vocab=112)
    before = resolve_model(file)
    as_gguf(made, file, all_in(Kind.F16), {})
    with pytest.raises(FlowspecError, match=r"tiny\.gguf has changed since it was first read: give the file"):
        before.checkpoint()
    assert resolve_model(file).checkpoint().stored(["lm_head.weight"])["lm_head.weight"].dtype == torch.float16


@pytest.mark.parametrize(("fields", "says"), [
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "positions scaled by 'longrope'"),
    ({"llama.attention.sliding_window": 64}, "layers that see a window of 64 rows"),
    ({"llama.attention.key_length": 32}, "heads of 32 values of which 16 are rotated"),
    ({"tokenizer.ggml.eot_token_id": -1}, None),
    ({"llama.expert_count": 4}, r"does not state llama\.expert_used_count"),
    ({"gemma3.final_logit_softcapping": 30.0}, r"gemma3\.final_logit_softcapping is 30\.0, which stages do not"),
    ({"gemma3.attn_logit_softcapping": 50.0}, r"gemma3\.attn_logit_softcapping is 50\.0"),
])
def test_what_cannot_be_computed_is_one_line(tmp_path: Path, fields: dict[str, Any], says: str | None) -> None:
    family = "gemma3_text" if min(fields).startswith("gemma3") else "llama"
    _, file = tiny_gguf(family, tmp_path, all_in(Kind.F32), vocab=112, fields=fields)
    if says is None:
        return
    with pytest.raises(FlowspecError, match=says):
        resolve_model(file)
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_scaled_positions(tmp_path: Path) -> None:
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 512}
    _, file = tiny_gguf("llama", tmp_path, all_in(Kind.F32), vocab=112, fields=yarn)
    found = resolve_model(file).parsed_config.rope_parameters
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == ("yarn", 4.0, 512)
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=2048, num_attention_heads=32, head_dim=64,
                         rope_parameters={**scaling, "rope_theta": 500_000.0}, max_position_embeddings=131_072)
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500_000.0 ** -(np.arange(0, 64, 2) / 64)
    assert np.allclose(plain / llama3_factors(500_000.0, 64, scaling), wanted.double().numpy(), rtol=1e-5)


def test_messages_name_the_file_that_was_given(tmp_path: Path) -> None:
    """Also a link to a file of another name, as in the hub's cache."""
    _, file = tiny_gguf("llama", tmp_path, all_in(Kind.F32), vocab=112)
    given = tmp_path / "given.gguf"
    given.symlink_to(file.rename(tmp_path / "5f0a"))
    model = resolve_model(given)
    assert (model.name, model.display_path, model.checkpoint().display_path) == ("given", given, given)
    with pytest.raises(UsageError, match=re.escape(f"which {given} does not have")):
        require_draft(strategy_class("pipedec"), TreeParameters(), model)
    _, note = with_a_draft(strategy_class("flowspec"), TreeParameters(), model)
    assert note.startswith(f"{given} has no draft model")
    with pytest.raises(FlowspecError, match=re.escape(f"{given} has no tensor lm_tail.weight")):
        model.checkpoint().path_of("lm_tail.weight")


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "is no GGUF file"),
    "other magic": (lambda data: b"GGML" + data[4:], "is no GGUF file"),
    "version 1": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "of version 1 cannot be read"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian cannot be read"),
    "cut in the header": (lambda data: data[:200], "is truncated or damaged"),
    "cut in the tensors": (lambda data: data[:-4000], "is truncated or damaged .*, and the file has"),
    "2^60 tensors": (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], r"\(1152921504606846976 items"),
    "2^62 fields": (lambda data: data[:16] + struct.pack("<Q", 1 << 62) + data[24:], r"\(4611686018427387904 items"),
    "a long name": (lambda data: data[:24] + struct.pack("<Q", 1 << 40) + data[32:], "a text of 1099511627776 bytes"),
    "no embeddings": (lambda data: data.replace(b"token_embd", b"token_embx"), "has no tensor token_embd.weight"),
    "another tensor": (lambda data: data.replace(b"blk.1.ffn_up.", b"blk.1.ffn_ux."),
                       r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
    "a type without values": (lambda data: data.replace(  # the norm as integers
        b"output_norm.weight\x01\0\0\0\x40\0\0\0\0\0\0\0\0\0\0\0",
        b"output_norm.weight\x01\0\0\0\x40\0\0\0\0\0\0\0\x18\0\0\0"), "stored as I8, which the package gguf cannot"),
    "another family": (lambda data: data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0bloom"), "'bloom'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_one_line(tmp_path: Path, damage: str) -> None:
    _, file = tiny_gguf("llama", tmp_path, all_in(Kind.Q4_0), vocab=112)
    change, says = DAMAGE[damage]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(FlowspecError, match=says) as error:
        cut(file, tmp_path / "out")
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_headers_are_those_that_the_package_reads(tmp_path: Path) -> None:
    _, file = tiny_gguf("qwen3_moe", tmp_path, mixed, vocab=112, fields={"a": [1.5, 2.5], "b": True, "c": -3})
    ours, theirs = read_header(file), gguf.GGUFReader(file)
    assert [(tensor.name, tensor.shape, tensor.type.name, tensor.at, tensor.nbytes) for tensor in ours.tensors] == [
        (tensor.name, tuple(reversed(tensor.shape.tolist())), tensor.tensor_type.name, tensor.data_offset,
         tensor.n_bytes) for tensor in theirs.tensors]
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.fields[key]
            found = value.tolist() if isinstance(value, np.ndarray) else value
            assert found == pytest.approx(field.contents()) if isinstance(found, float) else found == field.contents()


def test_json_of_the_home_is_readable(tmp_path: Path) -> None:
    _, file = tiny_gguf("llama", tmp_path, mixed, vocab=112, fields={"tokenizer.ggml.eot_token_id": 7})
    home = resolve_model(file).path
    assert json.loads((home / "generation_config.json").read_text()) == {"eos_token_id": [0, 7]}
    assert OpenModel(home).stop_ids == {0, 7}
