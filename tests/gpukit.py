"""The devices that tests run on, and the mark of tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

# CUDA code runs nowhere else, and the report says so.  The same tests run on the CPU everywhere: what is
# left out here is the GPU's share of them.
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
