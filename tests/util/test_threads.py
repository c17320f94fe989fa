"""Torch's threads: one for a small model, a share of the cores for processes, and before both the user's
choice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.util import threads


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def computed_with(model: Path) -> set[int]:
    """By a cluster in virtual time and by plain decoding, while they compute."""
    seen: set[int] = set()
    cluster = VirtualCluster(model, 2, load_profile("paper-7b"))
    cluster.generate(Request([1, 2, 3], max_new_tokens=4), lambda _: seen.add(torch.get_num_threads()))
    plain = PlainDecoder(model)
    plain.model.register_forward_hook(lambda *_: seen.add(torch.get_num_threads()))
    plain.generate([1, 2, 3], 2, Sampling())
    assert torch.get_num_threads() == 3
    return seen


def test_a_small_model_takes_one_thread(model: Path) -> None:
    assert computed_with(model) == {1}


def test_a_large_model_takes_as_many_as_before(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_SMALL", 1)
    assert computed_with(model) == {3}


def test_the_users_choice_stays(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert computed_with(model) == {3}
    assert threads.share_of_cores(2) is None


def test_processes_share_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [threads.share_of_cores(n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert threads.share_of_cores(2, model_bytes=1000) == 1
