"""A table of docs/experiments/planning.md: plain decoding on one board, predicted beside what others have published.

    python docs/build_one_board.py      writes it between its marks

``tests/boards/planning/test_published_speeds.py`` compares the file with it.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec_edge.boards.planning.board_spec import BoardSpec
from flowspec_edge.boards.planning.layer_split import problem_for
from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.boards.planning.one_board import plain_tokens_per_second
from flowspec_edge.device_profile import load_profile
from flowspec_edge.model.manifest import HeadBits

DOCUMENT = Path(__file__).resolve().parent / "experiments" / "planning.md"
BEGIN, END = "<!-- one board: begin -->", "<!-- one board: end -->"
CONTEXT = 512  # the publications do not say
MLC, TENSORRT, LLAMA_CPP = "MLC", "TensorRT Edge-LLM 0.10", "llama.cpp"
# lm_head as these engines have it
HEADS: dict[str, HeadBits] = {MLC: "int4", TENSORRT: "16bit", LLAMA_CPP: "int8"}
LLAMA_32_3B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
    "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Published:
    """``shape``: what the planner is asked for, if another model of the catalogue has the same shape."""

    board: str
    model: str
    engine: str
    tokens_per_second: float
    shape: str = ""


ROWS = (
    Published("orin-nano-8gb", "llama-3.1-8b", MLC, 14.0),
    Published("orin-nano-8gb", "Qwen2.5-7B", MLC, 14.2, "qwen2-7b"),
    Published("orin-nano-8gb", "Llama-3.2-3B", MLC, 27.7),
    Published("orin-nano-8gb-super", "llama-3.1-8b", MLC, 19.14),
    Published("orin-nano-8gb-super", "Qwen2.5-7B", MLC, 21.75, "qwen2-7b"),
    Published("orin-nano-8gb-super", "Llama-3.2-3B", MLC, 43.1),
    Published("orin-nx-16gb", "qwen3-1.7b", TENSORRT, 59.0),
    Published("orin-nx-16gb", "qwen3-4b", TENSORRT, 32.2),
    Published("orin-nx-16gb", "qwen3-8b", TENSORRT, 18.4),
    Published("agx-orin-64gb", "qwen3-4b", TENSORRT, 55.3),
    Published("agx-orin-64gb", "qwen3-8b", TENSORRT, 32.2),
    Published("orin-nano-8gb-super", "Llama-3.2-3B", LLAMA_CPP, 18.4),
    Published("agx-orin-64gb", "llama-2-7b", LLAMA_CPP, 22.5),
    Published("agx-orin-64gb", "llama-2-13b", LLAMA_CPP, 13.3),
)


def predicted(row: Published) -> float:
    """tokens/s with int4 layers, by the planner's own profile and sizes."""
    with tempfile.TemporaryDirectory() as place:
        name = row.shape or row.model
        if name == "Llama-3.2-3B":
            file = Path(place) / "config.json"
            file.write_text(json.dumps(LLAMA_32_3B))
            name = str(file)
        size = model_bytes(name, "int4", HEADS[row.engine])
    board, _ = BoardSpec(row.board, load_profile(row.board)).for_model(size)
    return plain_tokens_per_second(board, problem_for(size, CONTEXT, 1, 1))


def table() -> str:
    lines = ["| one board | model | engine | published | predicted | predicted / published |",
             "|---|---|---|---|---|---|"]
    for row in ROWS:
        rate = predicted(row)
        lines.append(f"| `{row.board}` | {row.model} | {row.engine} | {row.tokens_per_second:g} | {rate:.1f} "
                     f"| {rate / row.tokens_per_second:.2f} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """``text`` with the table between the marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
