"""Processes that compute elsewhere than the fork server may: on "cpu:0", which is any machine's CPU, but
not the device for which workers are forked; and on a GPU where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.torch_devices import needs_cuda

from flowspec_edge.d0 import models
from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.processes import run as processes
from flowspec_edge.drivers.processes.clusters import open_cluster
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec, Here
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.drivers.virtual.devices import Devices
from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.emulation.emulator import emulated
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling

PROMPT = [3, 7, 11, 2]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu:0", pytest.param("cuda:0", marks=needs_cuda)])
@pytest.mark.parametrize("emulates", [False, True])
def test_no_stage_is_forked_and_the_text_is_the_same(tiny_model: Path, device: str, emulates: bool,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Told(DraftModels):
        """A tensor of "cpu:0" says no more than "cpu", so the argument is looked at."""

        def __init__(self, model: Path, dtype: str, where: str = "cpu", *others: Any, **named: Any
                     ) -> None:
            asked.append(where)
            super().__init__(model, dtype, where, *others, **named)

    monkeypatch.setattr(processes, "DraftModels", Told)
    torch.empty(1, device=device)  # a context, if it is a GPU's: the stages must not inherit it
    stages = 1 if emulates else 2  # a single one of our own would share this process
    place = emulated(Devices.from_profile(load_profile("paper-7b"), stages)) if emulates else Here()
    with open_cluster(ClusterSpec(tiny_model, stages, device=device, threads=1), place) as clusters:
        result = clusters.generate(Request(PROMPT, "flowspec", 10))
        pids = clusters.pids
        assert [parent_of(pid) for pid in pids] == [os.getpid()] * stages
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in pids]
        configs = [command[command.index("--config") + 1] for command in commands]
        assert all(f'device = "{device}"\n' in Path(config).read_text() for config in configs)
    assert asked == [device]
    assert result.tokens == PlainDecoder(tiny_model).generate(PROMPT, 10, Sampling())[0]


def test_on_the_cpu_stages_are_forked_as_before(tiny_model: Path) -> None:
    with ProcessCluster(ClusterSpec(tiny_model, 2, threads=1)).start() as cluster:
        assert os.getpid() not in [parent_of(pid) for pid in cluster.pids]


@pytest.mark.parametrize("made", [DraftModels, PlainDecoder])
def test_float32_is_exact_without_a_plan_for_each_length(
        made: Callable[[Path], object], tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft device loads no layers, and settles its kernels all the same."""
    asked: list[object] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    made(tiny_model)
    assert asked[:2] == ["highest", False]


@pytest.mark.parametrize("missing", ["load_output_head", "load_drafters"])
def test_a_gpu_too_small_for_d0_is_one_line(missing: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(models, missing, refuse)
    with pytest.raises(FlowspecError, match=r"^no memory for (lm_head|the draft model).*torch_device\)$"):
        DraftModels(tiny_model).pass_seconds("eagle2")


@needs_cuda
def test_virtual_time_on_a_gpu(tiny_model: Path) -> None:
    before = torch.cuda.memory_allocated()
    cluster = VirtualCluster(tiny_model, 3, load_profile("paper-7b"), device="cuda:0")
    assert torch.cuda.memory_allocated() > before
    expected = PlainDecoder(tiny_model).generate(PROMPT, 10, Sampling())[0]
    for strategy in ("flowspec_plus", "megatron"):
        assert cluster.generate(Request(PROMPT, strategy, 10)).tokens == expected
