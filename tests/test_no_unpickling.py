"""Nothing in the package runs what it reads: no pickle, no YAML, no torch.load but of weights."""

from __future__ import annotations

import ast
import re

import pytest
from kits.package_sources import PACKAGE, trees

UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
# To name the error that torch.load raises for what it refuses; and to exchange requests and results with
# processes of its own, or with the workers of a Dask cluster that the user names.
MAY_NAME = {"model/weights/files.py": {"pickle.UnpicklingError"},
            "lab/bench/parallel.py": {"joblib.Parallel", "joblib.delayed", "joblib.parallel_config",
                                      "joblib.externals"}}


def faults(text: str, may_name: set[str], tree: ast.Module | None = None) -> list[str]:
    """What of a module could run what it reads; ``tree``: its own, if it is parsed."""
    found = []
    for node in ast.walk(tree or ast.parse(text)):
        names: set[str] = set()
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
        for name in names & UNPICKLERS:
            if not may_name or set(re.findall(rf"\b{name}\.\w+", text)) - may_name:
                found.append(f"line {node.lineno} imports {name}")
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func) if isinstance(node.func, ast.Attribute) else ""
            if called.endswith(("torch.load", "pickle.load")) and not any(
                    keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant)
                    and keyword.value.value is True for keyword in node.keywords):
                found.append(f"line {node.lineno}: {called} without weights_only=True")
            if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                found.append(f"line {node.lineno}: {called} with allow_pickle")
    return found


def test_nothing_that_is_read_is_run() -> None:
    assert len(trees()) > 200
    found = {name: wrong for path, tree in trees().values() for name in [str(path.relative_to(PACKAGE))]
             if (wrong := faults(path.read_text(encoding="utf-8"), MAY_NAME.get(name, set()), tree))}
    assert found == {}


def test_no_loader_runs_a_models_code() -> None:
    """transformers asks the user, who may say yes, unless it is told."""
    for name, (path, tree) in trees().items():
        for node in ast.walk(tree) if ".from_pretrained" in path.read_text(encoding="utf-8") else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained") \
                    and ast.unparse(node.func).startswith("Auto"):
                told = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert told.get("trust_remote_code") == "False", f"{name}:{node.lineno}"


@pytest.mark.parametrize("text", [
    "import pickle", "from pickle import loads", "import yaml.loader", "torch.load(path)",
    "torch.load(path, weights_only=False)", "numpy.load(path, allow_pickle=True)",
])
def test_it_would_be_seen(text: str) -> None:
    assert faults(text, set())


def test_a_module_that_may_name_an_error_may_not_unpickle() -> None:
    named = "import pickle\ntry:\n    f()\nexcept pickle.UnpicklingError:\n    pass"
    assert not faults(named, {"pickle.UnpicklingError"})
    assert faults(f"{named}\npickle.loads(data)", {"pickle.UnpicklingError"})
