"""What is given for a model and is none: one line that says what it is, before anything is missed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from kits.tiny_model_dir import tiny_model_dir
from kits.tiny_models import tiny_llama
from safetensors.torch import save_file
from transformers import AutoConfig

from flowspec_edge.errors import UsageError
from flowspec_edge.model.families import FAMILIES, with_defaults
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.model.recognise import refuse_unless_runnable

LORA = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-2-7b-hf"})
ALONE = {  # files alone -> what is said of them
    "": "is an empty directory: give the directory of the Hugging Face checkpoint",
    "adapter_config.json": r"is an adapter \(LoRA\), not a model: merge it into its model with peft",
    "model.nemo": r"model\.nemo: a NeMo checkpoint cannot be read: convert it",
    "model_weights/x": "is a NeMo checkpoint, which cannot be read: convert it",
    "latest_checkpointed_iteration.txt": "is a Megatron checkpoint, which cannot be read: convert it",
    "mp_rank_00/model_optim_rng.pt": "is a Megatron checkpoint, which cannot be read: convert it",
    "model.onnx": r"model\.onnx: an ONNX model cannot be read",
    "onnx/model.onnx": r"onnx/model\.onnx: an ONNX model cannot be read",
    "weights.npz": r"weights\.npz: an old MLX model cannot be read",
    "consolidated.safetensors": r"maker's own format \(consolidated\.\*\), which cannot be read",
    "consolidated.00.pth": r"maker's own format \(consolidated\.\*\), which cannot be read",
    "tf_model.h5": r"tf_model\.h5: weights of TensorFlow or Flax cannot be read",
    "rank0.engine": r"rank0\.engine: a TensorRT engine cannot be read",
    "model_index.json": "is a pipeline of diffusers, not a language model",
    "global_step10/mp_rank_00_model_states.pt": "checkpoint of DeepSpeed's training: make weights of it",
    "snapshots/0a1b/config.json": r"no config\.json; give one of the directories in it: .*/snapshots/0a1b",
    "Llama-2-7b/config.json": r"has no config\.json; give one of the directories in it: .*/Llama-2-7b",
    "tokenizer.json": r"is incomplete: config\.json is missing",
}
CONFIGS = {  # config.json alone -> what is said of it
    "bloom": ({"model_type": "bloom", "n_layer": 2}, "stages cannot run 'bloom' models, only llama, "),
    "mistral3": ({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}, "vision_config": {}},
                 "'mistral3' models, which hold a language model of the type 'ministral3' .*be run alone"),
    "gemma3": ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {}},
               "'gemma3' models, which hold a language model of the type 'gemma3_text' .*be run alone"),
    "gemma4": ({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}, "vision_config": {}},
               "'gemma4' models, a language model of the type 'gemma4_text' with parts that see or hear"),
    "llava": ({"model_type": "llava", "vision_config": {}}, "a language model with parts that see or hear"),
    "no type": ({"hidden_size": 64}, "names no model_type"),
    "TensorRT-LLM": ({"pretrained_config": {}}, "an engine or checkpoint of TensorRT-LLM"),
    "classifier": ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
                   "LlamaForSequenceClassification classifies text and gives no tokens: take"),
    "MLX": ({"model_type": "llama", "quantization": {"bits": 4, "group_size": 64}}, "quantised for MLX"),
    "Medusa": ({"architectures": ["MedusaModel"]}, r"is a draft head \(Medusa\), of a format that cannot be"),
    "DFlash": ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 1}},
               r"is a draft head \(DFlash\), not a model: give"),
    "speculators": ({"speculators_model_type": "eagle3"}, r"is a draft head \(EAGLE-3\), not a model"),
    **{method: ({"model_type": "llama", "quantization_config": {"quant_method": method}},
                f"weights quantised with {method} cannot be read; take the 16 bit checkpoint")
       for method in ("compressed-tensors", "bitsandbytes", "fp8", "modelopt", "exl2", "hqq", "mxfp4")},
    **{method.upper(): ({"model_type": "llama", "quantization_config": {"quant_method": method}},
                        f"{method.upper()} weights must be converted first: flowspec models shard")
       for method in ("awq", "gptq")},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), layers=2, hidden=32)


def refused(directory: Path, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        resolve_model(directory)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("name", ALONE)
def test_directories_of_other_tools(tmp_path: Path, name: str) -> None:
    if name:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    refused(tmp_path, ALONE[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json_alone_says_what_it_is(tmp_path: Path, name: str) -> None:
    config, message = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, message)


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_names_its_model(tmp_path: Path, model: Path, with_config: bool) -> None:
    (tmp_path / "adapter_config.json").write_text(LORA)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    if with_config:
        shutil.copy(model / "config.json", tmp_path)
    refused(tmp_path, r"is an adapter \(LoRA\) for meta-llama/Llama-2-7b-hf, not a model: merge it")


@pytest.mark.parametrize(("name", "ends", "message"), [
    ("quantize_config.json", "qweight", r'quantize_config\.json says .* with "quant_method": "gptq"'),
    ("quant_config.json", "qweight", r'quant_config\.json says .* with "quant_method": "awq"'),
    ("hf_quant_config.json", "weight_scale", r"hf_quant_config\.json says .* which cannot be read"),
])
def test_quantisation_that_config_json_does_not_tell(tmp_path: Path, model: Path, name: str, ends: str,
                                                     message: str) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    (copy / name).write_text('{"bits": 4, "group_size": 128}')
    refuse_unless_runnable(copy)  # its weights are plain
    save_file({f"model.layers.0.mlp.up_proj.{ends}": torch.zeros(1)}, copy / "model.safetensors")
    refused(copy, message)
    refuse_unless_runnable(model)


def test_heads_and_parts_are_no_models(tmp_path: Path) -> None:
    whole = tiny_model_dir(tmp_path / "whole", layers=2, hidden=32)
    refused(whole / "eagle2", r"is a draft head \(EAGLE\), not a model: give the model .*--draft .*/eagle2")
    shutil.copytree(whole / "target", tmp_path / "sharded" / "stage-1")
    (tmp_path / "sharded" / "manifest.json").write_text("{}")
    refused(tmp_path / "sharded" / "stage-1", "is one part of the sharded model .*/sharded: give that")
    shutil.copy(whole / "target" / "config.json", whole)
    with pytest.raises(UsageError, match=r"config\.json and .*/target/config\.json are two models"):
        resolve_model(whole)
    shutil.rmtree(whole / "target")
    (whole / "manifest.json").write_text("{}")
    refused(whole, r"a sharded model \(manifest\.json\) and a checkpoint \(config\.json\): move one")


def test_flowspecs_own_layout_without_its_target(tmp_path: Path, model: Path) -> None:
    whole = tiny_model_dir(tmp_path / "whole", layers=2, hidden=32)
    shutil.rmtree(whole / "draft-lm")
    (whole / "target").rename(whole / "my-14b")
    shutil.rmtree(whole / "spd")
    refused(whole, r"has a draft head, but no target: rename .*/whole/my-14b to .*/whole/target$")
    (whole / "target").symlink_to("my-ckpt")
    refused(whole, r"whole/target is a link to my-ckpt, which does not exist from there: link the model by its full")


def test_a_directory_beside_the_target_that_no_kind_has_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture
                                                                 ) -> None:
    whole = tiny_model_dir(tmp_path / "whole", layers=2, hidden=32)
    resolve_model(whole)
    assert not caplog.messages
    (whole / "eagle2").rename(whole / "my-head")
    resolve_model(whole)
    [said] = caplog.messages
    assert said.startswith(f"{whole / 'my-head'} is not read: a draft model goes by its directory's name, which is "
                           "one of eagle2, ")


def test_a_file_is_no_directory(model: Path) -> None:
    with pytest.raises(UsageError, match="it is a file: give the directory of the checkpoint"):
        resolve_model(model / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_left_out_are_those_of_transformers(family: str) -> None:
    theirs = AutoConfig.for_model(family)
    ours = with_defaults({"model_type": family})
    assert len(ours) > 3
    assert {name: getattr(theirs, name) for name in ours} == ours
    assert with_defaults({"model_type": family, "vocab_size": 77})["vocab_size"] == 77
