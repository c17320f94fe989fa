"""Settings of the process that must be there before torch is imported, here and in child processes."""

from __future__ import annotations

import os

# The models are tiny: a second thread costs more than it computes, on a loaded machine a hundred times more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
