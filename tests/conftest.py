"""Settings of the process that must be there before torch is imported, here and in child processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# The models are tiny: a second thread costs more than it computes, on a loaded machine a hundred times more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# In-process tensor-parallel ranks keep their sockets to the end; a usual limit of 1024 would just do.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
_most = 65536 if _hard == resource.RLIM_INFINITY else min(_hard, 65536)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(_soft, _most), _hard))


# pytest writes each test's name and phase into the environment, and a nursery (runtime.nursery) whose
# environment is not ours any more is replaced: every test would wait for another import of torch.
@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Run the test without that variable."""
    with _unnamed():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Iterator[None]:
    """Make fixtures without it, too."""
    with _unnamed():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("cuda"):
        import torch  # after the settings above

        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU here")


@contextmanager
def _unnamed() -> Iterator[None]:
    name = os.environ.pop("PYTEST_CURRENT_TEST")
    try:
        yield
    finally:
        os.environ["PYTEST_CURRENT_TEST"] = name
