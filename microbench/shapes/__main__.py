"""A stage's segments and D0's turn at the shapes of real models, with random weights.

    python -m microbench.shapes stage --shape llama-2-7b --device cuda --dtype fp16
    python -m microbench.shapes d0 --shape qwen3-8b --json figures.json

Without "stage" or "d0" it runs both.  Figures scaled from a few layers to all are labelled so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.bench.host_info import host_info, versions
from flowspec_edge.lab.bench.tables import frame, show
from flowspec_edge.util.files import check_writable, write_output
from flowspec_edge.util.torchdevice import architectures, gpus, memory_errors, pick
from microbench.shapes.d0 import CONTEXT, PartTime, part_times
from microbench.shapes.models import SHAPES
from microbench.shapes.stage import SegmentTime, segment_times
from microbench.shapes.stopwatch import copy_rate


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        device, _ = pick(args.device, gpus(), architectures(), needed=0)
        if args.json is not None:
            check_writable(args.json)
        with memory_errors(device):
            figures = _measured(args, device)
        if args.json is not None:
            write_output(args.json, json.dumps(figures, indent=1) + "\n")
    except FlowspecError as error:
        print(f"microbench.shapes: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _measured(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Measure the requested figures; each table is printed when it is complete."""
    dtype = args.dtype or ("bf16" if device == "cpu" else "fp16")
    console = Console(highlight=False)
    rate = copy_rate(device)
    about = host_info(device)
    threads = torch.get_num_threads()
    where = about.get("gpu", f"CPU, {threads} thread{'s'[:threads > 1]}")
    console.print(f"{args.shape}, random weights in {dtype}, {where}; a large copy reads and writes "
                  f"{rate / 1e9:.1f} GB/s", soft_wrap=True)
    figures: dict[str, Any] = {
        "shape": args.shape, "dtype": dtype, "device": device, "threads": threads, "machine": about,
        "versions": versions(), "copy_gb_per_s": round(rate / 1e9, 3)}
    if args.what in (None, "stage"):
        segments = list(segment_times(args.shape, dtype, device, args.layers, args.rows, args.contexts,
                                      rate))
        show(console, _stage_table(segments, args.layers, SHAPES[args.shape].num_hidden_layers))
        figures |= {"layers": args.layers, "stage": [asdict(segment) for segment in segments]}
    if args.what in (None, "d0"):
        parts = list(part_times(args.shape, dtype, device))
        show(console, _d0_table(parts))
        figures["d0"] = [asdict(part) for part in parts]
    return figures


def _stage_table(segments: Sequence[SegmentTime], layers: int, all_layers: int) -> Table:
    table = frame([], ["context", "rows", "ms", f"ms, {all_layers} layers (scaled)", "MB read",
                       "share of a copy's bytes/s", "launches"],
                  f"A segment in {layers} layer{'s'[:layers > 1]}", wide=True)
    for segment in segments:
        counted = str(segment.launches)
        if segment.cuda_launches is not None:
            counted += f" (CUDA: {segment.cuda_launches})"
        table.add_row(str(segment.context), str(segment.rows), f"{segment.ms:.2f}", f"{segment.whole_ms:.0f}",
                      f"{segment.bytes / 1e6:.0f}", f"{segment.copy_share:.0%}", counted)
    return table


def _d0_table(parts: Sequence[PartTime]) -> Table:
    table = frame(["part"], ["ms", "launches"], f"D0's parts, {CONTEXT} rows in the head's cache", wide=True)
    for part in parts:
        table.add_row(part.part, f"{part.ms:.2f}", str(part.launches or "–"))
    return table


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"whole numbers from 1, separated by commas, not {text!r}")
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m microbench.shapes",
                                     description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["stage", "d0"])
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["fp16", "bf16", "fp32", "int4"],
                        help="default: fp16 on a GPU, bf16 on a CPU; what int4 leaves out is bf16")
    parser.add_argument("--layers", type=int, default=1, choices=range(1, 81), metavar="N")
    parser.add_argument("--rows", type=_counts, default=[1, 16, 64, 128], metavar="N,N")
    parser.add_argument("--contexts", type=_counts, default=[128, 1024, 4096], metavar="N,N")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser


if __name__ == "__main__":
    sys.exit(main())
