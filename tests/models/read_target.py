"""What a version of transformers makes of the demonstration's target: run with the Python of each version.

    ENVIRONMENT/bin/python tests/models/read_target.py [DIR]

Prints the version, the tokenizer's class, and a digest of token ids and greedy texts, the same for all.
"""

import hashlib
import json
import sys
from pathlib import Path

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
TEXTS = ("def read(path):\n    return path  # ünïcode ✓", "<|endoftext|>class A:\n\tpass\n\n\n  x = 1_000",
         " leading", "", "日本語 🎉 don't I'll")
PROMPTS = ("def read_lines(path", "import os\n\ndef walk(path):", "class Stack:")
TOKENS = 48


def main(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).float().eval()
    ids = [tokenizer.encode(text) for text in TEXTS]
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        answer = model.generate(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask,
                                max_new_tokens=TOKENS, do_sample=False)
        answers.append(tokenizer.decode(answer[0]))
    read = [ids, [tokenizer.decode(one) for one in ids], answers, tokenizer.eos_token_id, len(tokenizer)]
    digest = hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16]
    print(transformers.__version__, type(tokenizer).__name__, digest)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else DEMO)
