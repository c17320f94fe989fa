"""4-bit weights: product times and the demonstration model's perplexity on unseen source, on CPU and GPU."""

from __future__ import annotations

import ast
import glob
import importlib.util
import inspect
import json
import math
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.stage.quant.base import KINDS, Kind
from flowspec_edge.stage.quant.schemes import scheme
from microbench._common import Row, print_rows

MIN_SPEEDUP = 4.0  # times as fast as bitsandbytes on a CPU, at 16 rows
_HELD_OUT_MODULES = (ast, glob, importlib.util)  # of the standard library: see held_out_groups in the model's card
_TOKENS, _WINDOW = 4096, 1024


def products(device: str) -> list[Row]:
    """Measure milliseconds by kind and rows, the ratio to bitsandbytes and, on a GPU, the share of its bandwidth."""
    command = [sys.executable, "-m", "flowspec_edge.cli.main", "device", "kernels", "--device", device,
               "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise FlowspecError(f"flowspec device kernels failed: {run.stderr.strip()}")
    report = json.loads(run.stdout)
    outputs, inputs = report["shape"]
    at = str(report["judged_at_rows"])
    lines: list[Row] = []
    for kind, facts in report["kinds"].items():
        if not facts["works"]:
            print(f"{kind} does not work on {device}: {facts['why']}")
            continue
        lines += [(f"{device}: {kind} weights, {outputs} x {inputs}, rows: {rows}", ms, "ms")
                  for rows, ms in facts["ms"].items()]
        lines += [(f"{device}: {kind}, share of a copy's bytes/s, rows: {rows}", 100 * share, "%")
                  for rows, share in facts.get("bandwidth_share", {}).items()]
    ms = {kind: facts["ms"][at] for kind, facts in report["kinds"].items() if facts["works"]}
    for other in ("nf4", "fp4"):
        if {other, "int4"} <= ms.keys():
            lines.append((f"{device}: {other} / int4 at {at} rows (wanted on a CPU: {MIN_SPEEDUP:g})",
                          ms[other] / ms["int4"], "x"))
    return lines


def quantising() -> list[Row]:
    """Measure the millions of weights that one core quantises in a second of CPU time."""
    weight = 0.02 * torch.randn(1024, 4096, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lines = []
        for kind in KINDS:
            kind_scheme = scheme(kind)
            start = time.process_time()
            kind_scheme.quantise(weight)
            rate = weight.numel() / (time.process_time() - start) / 1e6
            lines.append((f"quantising to {kind}, one core", rate, "M/s"))
        return lines
    finally:
        torch.set_num_threads(threads)


def perplexities(device: str = "cpu") -> list[Row]:
    target = resolve_model().target
    text = "\n".join(inspect.getsource(module) for module in _HELD_OUT_MODULES)
    ids = torch.tensor(AutoTokenizer.from_pretrained(target)(text, verbose=False).input_ids)[:_TOKENS + 1]
    title = f"{device}: perplexity, demo model, {len(ids) - 1} tokens of Python"
    cases: list[tuple[str, Kind | None, torch.dtype]] = [("fp16, computed in fp32", None, torch.float32)]
    cases += [(f"{kind}, computed in fp32", kind, torch.float32) for kind in KINDS]
    cases.append(("int4, computed in bf16", "int4", torch.bfloat16))
    lines: list[Row] = []
    for label, quantised, dtype in cases:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        if quantised:
            _quantise(model.model, quantised, dtype, device)
        lines.append((f"{title}: {label}", _perplexity(model.to(device, dtype), ids.to(device)), ""))
    return lines


def _quantise(decoder: nn.Module, kind: Kind, dtype: torch.dtype, device: str) -> None:
    kind_scheme = scheme(kind)
    for name, module in list(decoder.named_modules()):
        if isinstance(module, nn.Linear):
            rows, columns = module.weight.shape
            linear = kind_scheme.linear(rows, columns, module.bias is not None, dtype, device)
            linear.fill(kind_scheme.quantise(module.weight.detach()), module.bias)
            decoder.set_submodule(name, linear)


@torch.inference_mode()
def _perplexity(model: Any, ids: Tensor) -> float:
    """Return exp of the mean negative log-likelihood, in independent windows."""
    total = 0.0
    for start in range(0, len(ids) - 1, _WINDOW):
        window = ids[start:start + _WINDOW + 1]
        logits = model(window[None, :-1]).logits[0].float()
        total += float(functional.cross_entropy(logits, window[1:], reduction="sum"))
    return math.exp(total / (len(ids) - 1))


def main() -> None:
    logging.disable_progress_bar()
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for rows in (*map(products, devices), quantising(), *map(perplexities, devices)):
        print_rows(rows)


if __name__ == "__main__":
    main()
