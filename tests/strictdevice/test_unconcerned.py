"""Which changes leave out the tests on the strict device, in repositories of git's own making."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowspec_edge.d0.request import Request
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.sampling.rule import Sampling
from strictdevice import counting, unconcerned

COMPUTES = "from __future__ import annotations\n\nimport torch\n\n\ndef two():\n    return torch.ones(2)\n"
DECIDES = "def torch():\n    return 'import torch'\n"


def git(tree: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    named = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    return subprocess.run(["git", *named, *arguments], cwd=tree, env=environment, check=True, text=True,
                          capture_output=True).stdout


def write(tree: Path, path: str, text: str) -> None:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text, encoding="utf-8")


def commit(tree: Path, path: str, text: str) -> None:
    write(tree, path, text)
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "m")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A branch with a commit that computes nothing; main has one, too."""
    tree = tmp_path / "tree"
    tree.mkdir()
    git(tree, "init", "--quiet", "--initial-branch", "main")
    write(tree, "flowspec_edge/stage/forward.py", COMPUTES)
    write(tree, "deploy/constraints.txt", "torch==2.13.0\n")
    commit(tree, "flowspec_edge/d0/core.py", DECIDES)
    git(tree, "switch", "--quiet", "--create", "change")
    commit(tree, "README.md", "begun\n")
    return tree


def test_what_decides_and_what_is_read_leave_them_out(tree: Path) -> None:
    commit(tree, "docs/deploy.md", "import torch\n")
    commit(tree, "flowspec_edge/d0/core.py", DECIDES * 2)
    write(tree, "flowspec_edge/boards/new.py", DECIDES)
    left_out, why = unconcerned.judged(tree)
    assert left_out, why
    assert "none of the 4 files" in why


@pytest.mark.parametrize(("path", "text"), [
    ("flowspec_edge/stage/forward.py", COMPUTES + "\n"),
    ("flowspec_edge/stage/forward.py", DECIDES),  # it computed before
    ("flowspec_edge/d0/core.py", f"def f():\n    {COMPUTES}"),
    ("flowspec_edge/drafting/new.py", "if True:\n    from torch import nn\n"),
    ("tests/stage/test_new.py", "from kits.torch_devices import DEVICES\n"),
    ("tests/strictdevice/extension/kernels.h", "// c\n"), ("deploy/constraints.txt", "torch==2.14.0\n"),
])
def test_what_computes_has_them_run(tree: Path, path: str, text: str) -> None:
    write(tree, path, text)  # not added, not committed
    assert unconcerned.judged(tree)[0] is False
    commit(tree, path, text)
    commit(tree, "README.md", "later\n")
    left_out, why = unconcerned.judged(tree)
    assert not left_out
    assert f"runs: {path} changed since {git(tree, 'rev-parse', 'main')[:10]}" in why


def test_a_file_that_goes_or_moves_has_changed(tree: Path) -> None:
    git(tree, "mv", "flowspec_edge/stage/forward.py", "flowspec_edge/stage/back.py")
    assert "back.py and 1 more changed" in unconcerned.judged(tree)[1]
    git(tree, "rm", "--quiet", "--force", "flowspec_edge/stage/back.py")
    assert "runs: flowspec_edge/stage/forward.py changed" in unconcerned.judged(tree)[1]


def test_what_main_has_got_meanwhile_is_no_change(tree: Path) -> None:
    git(tree, "switch", "--quiet", "main")
    commit(tree, "flowspec_edge/stage/forward.py", COMPUTES + "\n")
    git(tree, "switch", "--quiet", "change")
    commit(tree, "README.md", "x\n")
    assert unconcerned.judged(tree)[0]


def test_on_main_the_last_commits_count(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unconcerned, "RECENT", 3)
    git(tree, "switch", "--quiet", "main")
    commit(tree, "flowspec_edge/stage/forward.py", COMPUTES + "\n")
    for number in range(2):
        assert "does not say" in unconcerned.judged(tree)[1]
        commit(tree, "README.md", f"{number}\n")
    assert "forward.py changed" in unconcerned.judged(tree)[1]
    commit(tree, "README.md", "more\n")
    assert unconcerned.judged(tree)[0]
    shallow = tree.parent / "shallow"
    git(tree.parent, "clone", "--quiet", "--depth", "3", f"file://{tree}", str(shallow))
    assert unconcerned.judged(shallow)[0] is False


def test_a_clone_knows_its_main_by_the_name_of_the_other_place(tree: Path) -> None:
    commit(tree, "README.md", "x\n")
    clone = tree.parent / "clone"
    git(tree.parent, "clone", "--quiet", str(tree), str(clone))  # of the branch: there is no main of its own
    assert unconcerned.judged(clone)[0]


def test_without_a_repository_they_run(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, unconcerned.__file__], cwd=tmp_path, text=True, capture_output=True,
                          check=False, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)})
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 1), done.stderr
    assert "make test-strict runs: " in done.stdout


@pytest.mark.strict
def test_what_launches_kernels_imports_torch(cuda: VirtualCluster, prompt: list[int]) -> None:
    with counting() as log:
        cuda.generate_many([Request(prompt, strategy, 16, sampling) for strategy, sampling in (
            ("flowspec_plus", Sampling()), ("pruned_pp", Sampling(0.8, 50, 0.9, seed=2)), ("spd", Sampling(1.0)))])
    found = {event.place.partition(":")[0] for event in log.events} - {""}
    assert {"stage/forward.py", "sampling/sampler.py"} < found
    root = Path(unconcerned.__file__).resolve().parents[2]
    assert [path for path in sorted(found) if not unconcerned.protected(root, "HEAD", f"flowspec_edge/{path}")] == []
