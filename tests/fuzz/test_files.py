"""Damaged manifests, configurations, TOML files and weight files are one line of error, or are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from kits.byte_mutations import FEW, amounts, corpus, fuzz
from pydantic import BaseModel
from safetensors.torch import save

from flowspec_edge.boards.inventory import Inventory
from flowspec_edge.d0.config import DraftConfig
from flowspec_edge.device_profile import Profile
from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.config import check_config, load_config, position_limit, read_decoder_config
from flowspec_edge.model.gguf.config import Fields, config_of
from flowspec_edge.model.gguf.header import read_header
from flowspec_edge.model.gguf.tokenizer import tokenizer_of
from flowspec_edge.model.manifest import Manifest
from flowspec_edge.model.weights.files import WeightFiles
from flowspec_edge.stage.families.decoder import skeleton
from flowspec_edge.util.bounded_read import parse_json
from flowspec_edge.util.terminal import printable
from flowspec_edge.util.tomlfile import parse_toml

ROOT = Path(__file__).parents[2]
DEMO_CONFIG = (ROOT / "models/demo/target/config.json").read_bytes()
WORKER = WorkerConfig(instance="v1", stage=1, stages=2, model="m", control="tcp://127.0.0.1:1",
                      listen="tcp://127.0.0.1:2", next="tcp://127.0.0.1:3").dump().encode()


def one_line(target: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def checked(data: bytes) -> object:
        try:
            return target(data)
        except FlowspecError as error:
            text = printable(" ".join(str(error).split()))
            assert text, "no message"
            assert text.isprintable()
            assert len(text) < 20_000, "no line for a person"
            raise
    return checked


def manifest() -> bytes:
    part = {"files": [{"path": "stage-1/model.safetensors", "size": 7, "sha256": "0" * 64}], "parameters": 3,
            "weight_bytes": 6, "row_bytes": 2}
    return json.dumps({
        "format": 1, "source": {"name": "m", "config_sha256": "1" * 64, "revision": None},
        "model_type": "llama", "layers": 2, "hidden_width": 8, "vocabulary": 9, "ranges": [[0, 2]],
        "dtype": "fp16", "compute_dtype": "fp16", "quantisation": {"kind": "int4", "group": 64, "kept": []},
        "request": "2" * 64, "parts": {"stage-1": part, "draft": {**part, "files": []}}}).encode()


@amounts
def test_manifests(count: int) -> None:
    def read(data: bytes) -> None:
        found = Manifest.parse(data, Path("manifest.json"))
        assert " ".join(printable(found.model_dump_json()).split()).isprintable()

    assert fuzz(one_line(read), [manifest(), *corpus("manifest")], count) >= 1


def test_ever_deeper_brackets_are_refused() -> None:
    for depth in (70, 990, 100_000):
        for opening in (b"[", b'{"a":'):
            assert fuzz(one_line(lambda data: parse_json(data, "f")), [opening * depth], 0) == 0
    with pytest.raises(FlowspecError, match="nests lists or objects more than"):
        Manifest.parse(b"[" * 100_000, Path("manifest.json"))


@amounts
def test_model_configurations(count: int) -> None:
    def read(data: bytes) -> None:
        config = parse_json(data, "config.json")
        if isinstance(config, dict):
            check_config(config, Path("config.json"), ("num_hidden_layers", "max_position_embeddings"))
            assert position_limit(config) >= 1

    assert fuzz(one_line(read), [DEMO_CONFIG, *corpus("config")], count) >= 1


def test_model_configurations_in_transformers(tmp_path: Path) -> None:
    def read(data: bytes) -> None:
        (tmp_path / "config.json").write_bytes(data)
        config = load_config(tmp_path)
        if config.num_hidden_layers < 20 and config.vocab_size < 1 << 20 and config.hidden_size < 1 << 14:
            skeleton(read_decoder_config(tmp_path))

    assert fuzz(one_line(read), [DEMO_CONFIG, *corpus("config")], 3 * FEW) >= 1


PROFILE = (ROOT / "profiles/paper-7b.toml").read_bytes()
CLUSTER = (ROOT / "deploy/cluster.example.toml").read_bytes()
DRAFT = DraftConfig(cluster="c", model="m", name="n", control="tcp://127.0.0.1:1", output="tcp://127.0.0.1:2",
                    first="tcp://127.0.0.1:3", instances=["v1", "v2"]).dump().encode()


@amounts
@pytest.mark.parametrize(("model", "seed"), [(Profile, PROFILE), (Inventory, CLUSTER), (WorkerConfig, WORKER),
                                             (DraftConfig, DRAFT)])
def test_toml_files(model: type[BaseModel], seed: bytes, count: int) -> None:
    """A quarter of the mutations each, since a fault's line is looked for in the whole file."""
    fuzz(one_line(lambda data: parse_toml(data, Path("f.toml"), model)), [seed, *corpus("toml")], count // 4)


@amounts
def test_gguf_headers(count: int, tmp_path: Path) -> None:
    """Without the tokenizer, which makes up most of a tiny file's header."""
    path, seed = tmp_path / "model.gguf", tmp_path / "seed.gguf"
    writer = gguf.GGUFWriter(str(seed), "llama")
    for key, value in {"block_count": 1, "embedding_length": 32, "attention.head_count": 2, "context_length": 64,
                       "feed_forward_length": 32, "attention.layer_norm_rms_epsilon": 1e-5}.items():
        writer.add_key_value(f"llama.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.add_key_value("tokenizer.ggml.tokens", ["a", "b"], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)
    for name, kind in (("token_embd.weight", gguf.GGMLQuantizationType.Q4_0), ("blk.0.attn_q.weight",
                                                                             gguf.GGMLQuantizationType.F16)):
        writer.add_tensor(name, gguf.quants.quantize(np.ones((2, 32), np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        header = read_header(path)
        fields = Fields(path, header.fields)
        config_of(fields, {tensor.name for tensor in header.tensors}, 2, None)
        tokenizer_of(fields)

    fuzz(one_line(read), [seed.read_bytes()], count)
    header = read_header(seed)
    assert config_of(Fields(seed, header.fields), (), 2, None)["head_dim"] == 16


@amounts
def test_safetensors(count: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        file = WeightFiles().open(path)
        for name, info in file.tensors.items():
            if info.nbytes:
                file.read(name, 0, 1)

    seed = save({"a": torch.ones(2, 3, dtype=torch.float16), "b.weight": torch.arange(4),
                 "c": torch.ones(())})
    assert fuzz(one_line(read), [seed, *corpus("safetensors")], count) >= 1
