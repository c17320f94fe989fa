"""What EAGLE's own code makes of the demonstration's target and head: run where eagle-llm 1.2.1 is installed.

    ENVIRONMENT/bin/python tests/models/read_head.py [HEAD]

Measured with transformers 4.46.3.  It loads the head, every tensor by name, and generates greedily with a
static tree; the texts must be those of transformers.  Prints tokens per round.
"""

import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
PROMPTS, TOKENS = 6, 64


def main(head: Path) -> None:
    eagle: Any = importlib.import_module("eagle.model.ea_model")
    with tempfile.TemporaryDirectory() as made:
        shutil.copy(head / "config.json", made)
        weights = load_file(head / "model.safetensors")
        if "embed_tokens.weight" not in weights:  # a head may be stored without it
            target = load_file(DEMO / "target" / "model.safetensors")
            weights["embed_tokens.weight"] = target["model.embed_tokens.weight"]
        torch.save(weights, Path(made, "pytorch_model.bin"))  # the only file that it knows
        model = eagle.EaModel.from_pretrained(base_model_path=str(DEMO / "target"), ea_model_path=made,
                                              torch_dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(DEMO / "target", torch_dtype=torch.float32)
    rounds, verify = 0, eagle.tree_decoding

    def counted(*arguments: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return verify(*arguments)

    eagle.tree_decoding = counted
    tokens = 0
    for line in (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]:
        ids = torch.tensor([model.get_tokenizer()(json.loads(line)["prompt"])["input_ids"]])
        with torch.inference_mode():
            text = model.eagenerate(ids, temperature=0, max_new_tokens=TOKENS)[0].tolist()
            expected = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS,
                                      do_sample=False)[0].tolist()
        length = min(len(text), len(expected))
        assert text[:length] == expected[:length], f"another text than transformers': {line[:60]}"
        tokens += len(text) - ids.shape[1]
    print(f"{PROMPTS} texts are transformers'; {tokens / rounds:.2f} tokens a round")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO / "eagle2")
