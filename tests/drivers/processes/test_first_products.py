"""What is computed first takes long on a board, which reads libraries and weights from a card: it must be
over when systemd's watchdog begins to count, or be announced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.sampling.rule import Sampling

_PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm")


class Products(TorchDispatchMode):
    """Whether each matrix product was computed within ``slow``, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.slowly: list[bool] = []
        self.depth = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.__name__.split(".")[0] in _PRODUCTS:
            self.slowly.append(self.depth > 0)
        return func(*args, **kwargs or {})

    @contextmanager
    def slow(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


@pytest.mark.parametrize("kind", ["eagle2", "lm"])
def test_a_draft_model_is_loaded_and_tried_slowly(tiny_model: Path, kind: str) -> None:
    with Products() as products:
        device = DraftModels(tiny_model, slow=products.slow)
        assert products.slowly == []
        device.pass_seconds(kind)
        assert products.slowly
        assert all(products.slowly)
        assert products.depth == 0


@pytest.mark.soak  # a stage's process imports for long
def test_once_a_token_has_come_no_request_reads_another_library(tiny_model: Path) -> None:
    """Neither on D0 nor in a stage: a service is ready with its first token, whatever it is asked then."""
    with Products() as products, ProcessCluster(ClusterSpec(tiny_model, 1, slow=products.slow)).start() as cluster:
        assert products.slowly[0]  # lm_head
        cluster.generate(Request([0], "flowspec_plus", 1))  # as `flowspec draft` does before it is ready
        processes = (os.getpid(), *cluster.pids)
        before = [libraries(pid) for pid in processes]
        for rows in (33, 200):
            sampling = Sampling(0.7, top_k=20, top_p=0.8, seed=rows)
            cluster.generate(Request([1] * rows, "flowspec_plus", 5, sampling, logprobs=2))
        assert [libraries(pid) - known for pid, known in zip(processes, before, strict=True)] == [set()] * 2


def libraries(pid: int) -> set[str]:
    """The shared objects that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {name for line in lines if ".so" in (name := line.rpartition(" ")[2])}
