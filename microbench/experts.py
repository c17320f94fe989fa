"""A mixture of experts on one core: time by rows, beside transformers' implementations, and touched experts.

The experts of Qwen3-30B-A3B: 128 (``--experts N``) of 768, width 2048, 8 a row; in bf16 1.2 GB and in int4
0.3, so that no cache holds them.  Rows choose at random: all of their experts by themselves, or half of them
together.
"""

from __future__ import annotations

import time
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from flowspec_edge.lab.plain import separated
from flowspec_edge.model.expert_counts import independent
from flowspec_edge.model.experts import Experts
from flowspec_edge.model.families import ExpertNames
from flowspec_edge.stage.quant.schemes import scheme
from microbench._common import Row, options, print_rows, random_codes

ROWS = (1, 2, 4, 8, 16, 32)
WIDTH, INNER, TOP_K = 2048, 768, 8
_TIMES = 9


def stacked(experts: int) -> Any:
    """Return the experts of transformers, in bf16."""
    config = AutoConfig.for_model("qwen3_moe", hidden_size=WIDTH, moe_intermediate_size=INNER,
                                  num_experts=experts)
    module = Qwen3MoeExperts(config).to(torch.bfloat16).eval()
    for value in module.parameters():
        nn.init.normal_(value, std=0.02)
    return module


def ours(theirs: Any, int4: bool) -> Experts:
    """Return the experts as a stage loads them: views of the same weights, or random codes of 4 bits."""
    module = separated(theirs, ExpertNames())
    experts: list[Any] = list(module.children())
    for expert, gate_up, down in zip(experts, theirs.gate_up_proj, theirs.down_proj, strict=True):
        for name in expert.side_by_side:
            delattr(expert, name)
        expert.joined, expert.down_proj = map(_int4 if int4 else _plain, (gate_up, down))
    return module


def _plain(weight: Tensor) -> nn.Module:
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear


def _int4(weight: Tensor) -> nn.Module:
    how = scheme("int4")
    rows, columns = weight.shape
    linear = how.linear(rows, columns, False, torch.bfloat16)
    linear.fill(random_codes(how, rows, columns))
    return linear


def choice(rows: int, experts: int, shared: int) -> Tensor:
    """Choose experts for each row: [rows, TOP_K] int64.

    The first ``shared`` of them are the same in all rows; of the others each row chooses by itself.
    """
    order = torch.randperm(experts)
    own_choices = torch.rand(rows, experts - shared).topk(TOP_K - shared).indices
    return torch.cat([order[:shared].expand(rows, -1), order[shared:][own_choices]], 1)


@torch.inference_mode()
def measure(theirs: Any, modules: dict[str, Experts], rows: int, shared: int) -> list[Row]:
    """Measure medians of passes in turn, each over other rows, which touch other experts.

    The time is the process's, which other processes on the machine change least.
    """
    modules_by_name: dict[str, Any] = {**modules, "transformers' grouped products, bf16": "grouped_mm",
                                       "transformers' loop, bf16": "eager"}
    times_by_name: dict[str, list[float]] = {name: [] for name in modules_by_name}
    counts = []
    for _ in range(_TIMES):
        for name, module in modules_by_name.items():
            if isinstance(module, str):
                theirs.config._experts_implementation = module
            x = torch.randn(rows, WIDTH, dtype=torch.bfloat16)
            expert_ids = choice(rows, theirs.num_experts, shared)
            weights = torch.rand(rows, TOP_K).softmax(-1).to(torch.bfloat16)
            counts.append(len(expert_ids.unique()))
            begun = time.process_time()
            (theirs if isinstance(module, str) else module)(x, expert_ids, weights)
            times_by_name[name].append(1e3 * (time.process_time() - begun))
    case = f"rows: {rows}, of {TOP_K} experts shared: {shared}"
    lines = [(f"{name}, {case}", median(times[1:]), "ms") for name, times in times_by_name.items()]
    return [*lines, (f"experts touched of {theirs.num_experts}, {case}", mean(counts), ""),
            (f"  by independent rows: U({rows})", independent(theirs.num_experts, TOP_K, rows), "")]


def main() -> None:
    theirs = stacked(options(__doc__, experts=128).experts)
    modules = {f"ours, {name}": ours(theirs, int4) for name, int4 in (("bf16", False), ("int4", True))}
    for shared in (0, TOP_K // 2):
        for rows in ROWS:
            print_rows(measure(theirs, modules, rows, shared))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    main()
