"""The time of looking up a segment's rows in an embedding table that stays in its file.

    python -m microbench.shapes.embeddings [--rows 16] [--lookups 200] [--directory DIR]

The table is that of qwen3-32b: 151,936 rows of 10 KB, 1.6 GB of disk.  A look-up blocks the stage's loop, and
so its heartbeats, for as long as it takes.

cold   the table was dropped from the page cache before
warm   the same rows were looked up before
busy   cold, beside a process that writes to the same disk, synchronously, and drops the table meanwhile
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import torch

from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.model.catalogue import known_models
from flowspec_edge.sharding.writer import TensorFile
from flowspec_edge.stage.weights.tensor_names import EMBEDDING
from flowspec_edge.util.bounded_read import UncachedFile
from flowspec_edge.util.weight_file import EmbeddingTable, SafetensorsFile
from microbench._common import Row, print_rows

MODEL = "qwen3-32b"
_PIECE = 1024  # rows that are written at a time
_WRITTEN = 8 << 20  # bytes that the busy neighbour writes between two syncs


def write_table(path: Path, rows: int, width: int) -> None:
    piece = torch.randn(_PIECE, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    with TensorFile(path, {EMBEDDING: ((rows, width), torch.bfloat16)}) as file:
        for lo in range(0, rows, _PIECE):
            file.write(EMBEDDING, piece[: rows - lo])


def look_ups(path: Path, rows: int, lookups: int) -> Iterator[Row]:
    opened = time.perf_counter()
    table = EmbeddingTable(SafetensorsFile(path), EMBEDDING, torch.bfloat16)
    yield "opening the table: its values are read once", time.perf_counter() - opened, "s"
    stored = UncachedFile(path)
    generator = np.random.default_rng(0)

    def tokens() -> torch.Tensor:
        return torch.from_numpy(generator.integers(table.num_embeddings, size=rows))

    def cold() -> torch.Tensor:
        stored.drop()
        return tokens()

    def warm() -> torch.Tensor:
        table(again := tokens())
        return again

    yield from _timed("cold", table, cold, lookups)
    yield from _timed("warm", table, warm, lookups)
    with _busy_disk(path):
        yield from _timed("busy", table, cold, lookups)


def _timed(name: str, table: EmbeddingTable, prepare: Callable[[], torch.Tensor], lookups: int
           ) -> Iterator[Row]:
    seconds, read_bytes = [], 0
    for _ in range(lookups):
        tokens = prepare()
        before = _read_bytes()
        start = time.perf_counter()
        table(tokens)
        seconds.append(time.perf_counter() - start)
        read_bytes += _read_bytes() - before
    for quantile, share in (("median", 50), ("99 %", 99), ("worst", 100)):
        yield f"{name}, {quantile}", 1e3 * float(np.percentile(seconds, share)), "ms"
    yield f"{name}, read from the disk in a look-up", read_bytes / lookups / 1e3, "KB"


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


@contextmanager
def _busy_disk(table: Path) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    with tempfile.NamedTemporaryFile(dir=table.parent) as scratch:
        neighbour = context.Process(target=_keep_busy, args=(table, Path(scratch.name), begun), daemon=True)
        neighbour.start()
        try:
            begun.wait()
            yield
        finally:
            neighbour.terminate()
            neighbour.join()


def _keep_busy(table: Path, scratch: Path, begun: Event) -> None:
    stored, data = UncachedFile(table), os.urandom(_WRITTEN)
    with scratch.open("r+b") as file:
        while True:
            file.seek(0)
            file.write(data)
            file.flush()
            os.fdatasync(file.fileno())
            stored.drop()
            begun.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="of a segment")
    parser.add_argument("--lookups", type=int, default=200)
    parser.add_argument("--directory", type=Path, help="for the table; default: where temporary files go")
    args = parser.parse_args()
    config = known_models()[MODEL].config
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        path = Path(directory, "embed.safetensors")
        write_table(path, config["vocab_size"], config["hidden_size"])
        print_rows(look_ups(path, args.rows, args.lookups))
    beat = WorkerConfig.model_fields["heartbeat_s"].default
    print_rows([("for comparison: time between two heartbeats", 1e3 * beat, "ms")])


if __name__ == "__main__":
    main()
