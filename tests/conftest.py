"""Settings that must be made before torch is imported, here and in child processes."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from kits.hypothesis_examples import examples
from kits.processor_seconds import OPTION, ProcessorSeconds

# The models are tiny: a second thread costs more than it computes, on a loaded machine a hundred times more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
# A model that a developer has fetched would change the default of some commands.
os.environ["FLOWSPEC_MODELS"] = str(Path(tempfile.gettempdir()) / "flowspec-tests-without-models")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


# The collector would look at all that importing and collecting leaves behind again and again; see the end of
# the collection, below.
gc.disable()

# An example that takes longer on a loaded machine is no failure.
hypothesis.settings.register_profile("flowspec", examples(100, quick=25))
hypothesis.settings.load_profile("flowspec")
# Of a planted fault (tests/faults), the first example that fails will do.
hypothesis.settings.register_profile("unshrunk", hypothesis.settings.get_profile("flowspec"),
                                     phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=int, default=0, metavar="N",
                     help="name the N files and the N tests that cost the most processor seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorSeconds(config), "processor seconds")


def pytest_collection_finish() -> None:
    """Modules, models' classes and tests stay to the end: leave them out of every later collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch  # after the settings above

        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU here")
    if item.get_closest_marker("strict"):
        import strictdevice

        if not strictdevice.installed():
            pytest.skip("the strict device is not installed: make test-strict")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model directory of two layers with every kind of draft; any text is a prompt.  Only read it: all
    tests of a process share it that define no ``model`` of their own."""
    from kits.tiny_model_dir import tiny_model_dir  # after the settings above

    return tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2, hidden=32)


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """For sockets below it: their paths have at most 107 bytes, and pytest's own directories take most of
    them."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        yield Path(directory)
