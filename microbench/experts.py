"""A mixture of experts on one core: time by rows, beside transformers' implementations, and touched experts.

The block of Qwen3-30B-A3B in bf16: 128 experts (``--experts N``) of 768, width 2048, 8 a row, 1.2 GB, so that
no cache holds them.  Rows and router are random: rows choose independently.
"""

from __future__ import annotations

import time
from statistics import mean, median
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from flowspec_edge.stage.layers.experts import Experts, independent, separated
from microbench._common import Row, options, print_rows

ROWS = (1, 4, 16, 32)
THEIRS = ("grouped_mm", "eager")  # the first is the default
_TIMES = 15


def block(experts: int) -> Any:
    config = AutoConfig.for_model("qwen3_moe", hidden_size=2048, moe_intermediate_size=768,
                                  num_experts=experts, num_experts_per_tok=8, norm_topk_prob=True)
    made = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16).eval()
    for value in made.parameters():
        torch.nn.init.normal_(value, std=0.02)
    return made


def same_weights(stacked: Any) -> Experts:
    """Ours, with views of transformers' tensors."""
    ours, inner = separated(stacked, "qwen3_moe"), stacked.intermediate_dim
    for expert, gate_up, down in zip(ours, stacked.gate_up_proj, stacked.down_proj, strict=True):
        expert.load_state_dict({"gate_proj.weight": gate_up[:inner], "up_proj.weight": gate_up[inner:],
                                "down_proj.weight": down}, assign=True)
    return ours


@torch.inference_mode()
def measure(made: Any, ours: Experts, rows: int) -> list[Row]:
    """Medians of passes in turn, each over other rows, which touch other experts; the process's time, which
    other processes on the machine change least."""
    taken: dict[str, list[float]] = {name: [] for name in ("ours", *THEIRS)}
    stacked, counts = made.experts, []
    for _ in range(_TIMES):
        for name, seconds in taken.items():
            made.experts = ours if name == "ours" else stacked
            stacked.config._experts_implementation = name
            x = torch.randn(1, rows, stacked.hidden_dim, dtype=torch.bfloat16)
            begun = time.process_time()
            made(x)
            seconds.append(1e3 * (time.process_time() - begun))
            if made.experts is ours and ours.chosen is not None:
                counts.append(len(ours.chosen.unique()))
    made.experts = stacked
    whole, k = len(ours), made.gate.top_k
    lines = [(f"{name}, rows: {rows}", median(times[1:]), "ms") for name, times in taken.items()]
    return [*lines, (f"experts touched of {whole}, rows: {rows}", mean(counts), ""),
            (f"  by independent rows: U({rows})", independent(whole, k, rows), "")]


def main() -> None:
    made = block(options(__doc__, experts=128).experts)
    ours = same_weights(made.experts)
    for rows in ROWS:
        print_rows(measure(made, ours, rows))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    main()
