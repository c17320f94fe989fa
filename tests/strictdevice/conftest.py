from __future__ import annotations

from pathlib import Path

import pytest

from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    return Tokenizer(OpenModel(DEMO)).encode("def fibonacci(n):\n")


@pytest.fixture(scope="session")
def cpu() -> VirtualCluster:
    return VirtualCluster(DEMO, 3, load_profile("paper-7b"), device="cpu")


@pytest.fixture(scope="session")
def cuda() -> VirtualCluster:
    return VirtualCluster(DEMO, 3, load_profile("paper-7b"), device="cuda")
