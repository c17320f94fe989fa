"""The devices that tests run on, and the mark of tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

# CUDA code runs nowhere else.  The same tests run on the CPU everywhere: what is left out there
# (tests/conftest.py), and the report says so, is the GPU's share of them, which `pytest -m cuda` selects.
needs_cuda = pytest.mark.cuda
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
# What is said where there is no GPU can be seen only there; with a GPU the command would do its work instead.
without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the command works, and does not say that one is missing")
