"""The mark of tests that need a GPU: CUDA code runs nowhere else, and the report says so."""

from __future__ import annotations

import pytest
import torch

# The same tests run on the CPU everywhere: what is left out here is the GPU's share of them.
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
