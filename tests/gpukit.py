"""The mark of tests that need a GPU: CUDA code runs nowhere else, and the report says so."""

from __future__ import annotations

import pytest

# The same tests run on the CPU everywhere: what is left out there (tests/conftest.py) is the GPU's share of
# them, which `pytest -m cuda` selects.
needs_cuda = pytest.mark.cuda
