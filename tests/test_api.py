"""The Python interface: its examples run, its reference is current, strategies from outside have names."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from kits import documents

import flowspec_edge
from flowspec_edge import (
    Cluster,
    Parameters,
    Params,
    RequestFailed,
    Sampling,
    TreeStrategy,
    UsageError,
    strategy_class,
    strategy_names,
)
from flowspec_edge.strategies import registry
from flowspec_edge.strategies.params import set_parameters
from flowspec_edge.strategies.registry import parameters_of

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "two_chains"


def run(*command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    package = os.pathsep.join(str(entry) for entry in (path, ROOT) if entry)
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False,
                          timeout=300, env={**os.environ, "PYTHONPATH": package})


@pytest.mark.slow
def test_the_examples_of_the_document_run(tmp_path: Path) -> None:
    examples = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8").split("## Reference")[0]
    blocks = re.findall(r"```python\n(.*?)```", examples, re.DOTALL)
    assert len(blocks) == 2
    script = tmp_path / "examples.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    assert "busy seconds:" in done.stdout


@pytest.mark.slow
def test_the_strategy_of_the_guide_runs(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "write-a-strategy.md").read_text(encoding="utf-8")
    module, script = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "one_chain.py").write_text(module, encoding="utf-8")
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = run(str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr


def test_the_reference_is_that_of_the_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build_api.py", "--check"])
    assert documents.builder("build_api").main() == 0, "run docs/build_api.py"


def test_the_package_is_imported_without_the_heavy_libraries() -> None:
    done = run("-c", "import sys, flowspec_edge; print(flowspec_edge.__version__, 'torch' in sys.modules,"
                     " 'numpy' in sys.modules)")
    assert re.fullmatch(r"\d+\.\d+\.\d+ False False\n", done.stdout), done.stderr
    assert "Cluster" in dir(flowspec_edge)
    assert not hasattr(flowspec_edge, "nothing")


def test_the_package_is_a_command() -> None:
    assert "two_chains" not in (listed := run("-m", "flowspec_edge", "strategies").stdout)
    assert "flowspec_plus" in listed
    assert re.fullmatch(r"flowspec-edge \d+\.\d+\.\d+\n", run("-m", "flowspec_edge", "--version").stdout)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.virtual("demo", stages=2)


@pytest.fixture(autouse=True)
def loaded_here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies from outside are unknown to the tests that follow."""
    monkeypatch.setattr(registry, "_loaded", {})


@pytest.fixture
def two_chains(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return strategy_class("two_chains:TwoChains").name


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5)], ids=["T0", "T1"])
def test_a_strategy_from_outside_is_lossless(cluster: Cluster, two_chains: str, sampling: Sampling) -> None:
    assert two_chains in strategy_names()
    request = cluster.request("def add(a, b):", strategy=two_chains, max_new_tokens=24, sampling=sampling,
                              params=Params(two_chains_levels=3))
    answer = cluster.generate(request)
    assert answer.tokens == cluster.plain(request)
    assert answer.stats.accepted > 0
    assert answer.text == cluster.tokenizer.decode(answer.tokens)
    assert cluster.spans


def test_a_strategy_from_outside_has_parameters(two_chains: str) -> None:
    known = parameters_of(strategy_class(two_chains))
    assert next(iter(known)) == "two_chains_levels"
    given = set_parameters(Params(), ["two_chains_levels=3", "segment=8"], known, two_chains)
    assert (given.segment, given.flat()["two_chains_levels"]) == (8, 3)
    assert given == Params(segment=8, two_chains_levels=3)
    for setting in ("two_chains_levels=0", "two-chains-levels=x", "two_chains_level=2"):
        with pytest.raises(UsageError, match=r"two[-_]chains[-_]levels"):
            set_parameters(Params(), [setting], known, two_chains)


def test_requests_together_and_in_pieces(cluster: Cluster) -> None:
    pieces: list[str] = []
    alone = cluster.generate("import os\n", max_new_tokens=12, on_text=pieces.append)
    assert "".join(pieces) == alone.text
    prompts = ("import os\n", "class A:")
    together = cluster.generate_many([cluster.request(text, max_new_tokens=12) for text in prompts])
    assert together[0].tokens == alone.tokens


@pytest.mark.slow
def test_the_example_can_be_installed(tmp_path: Path) -> None:
    """What commands do with an entry point's strategy: test_from_outside.py."""
    site = tmp_path / "site"
    made = run("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
               "--disable-pip-version-check", "--target", str(site), str(EXAMPLE))
    assert made.returncode == 0, made.stderr
    assert "two_chains" in run("-m", "flowspec_edge", "strategies", path=site).stdout


class Abstract(TreeStrategy):
    name = "abstract"
    summary = "no next_segment"


class Nameless(TreeStrategy):
    def next_segment(self) -> None:
        return None


class Impostor(Nameless):
    name = "flowspec"
    summary = "another strategy's name"


@dataclass(frozen=True)
class Bare(Parameters):
    levels: int = 3


class Undescribed(Nameless):
    name = "undescribed"
    summary = "a parameter without a meaning"
    parameters = Bare


class Listing(Undescribed):
    name = "listing"
    parameters = ("width",)  # type: ignore[assignment]


@pytest.mark.parametrize(("name", "reason"), [
    ("no_module_of_this_name:X", "cannot load .* ModuleNotFoundError"),
    (f"{__name__}:Missing", "cannot load .* AttributeError"),
    (f"{__name__}:ROOT", "is not a strategy"), (f"{__name__}:Abstract", "is not a strategy"),
    (f"{__name__}:Nameless", "needs two class attributes"), (f"{__name__}:Impostor", "another strategy, f"),
    (f"{__name__}:Undescribed", "does not describe its parameter levels"),
    (f"{__name__}:BadDefault", "that it does not allow: out_share must be at most 1, not 1.5"),
    (":Nothing", "write package.module:Class"), ("./mine.py:Mine", "without a path"),
    ("nowhere_at_all.module:X", "in the current directory or among the"),
    (f"{__name__}:Listing", "must declare its parameters as a dataclass"),
    ("unknown", "no strategy 'unknown'; there are autoregressive,"),
])
def test_what_is_no_strategy_is_refused(name: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        strategy_class(name)


class Faulty(TreeStrategy):
    name = "faulty"
    summary = "divides by zero when the first draft pass is wanted"

    def begin_round(self) -> None:
        self.expand([self.tree.root], levels=1 // self.tree.size, width=2, keep=2)

    def next_segment(self) -> None:
        return None


def test_what_a_strategy_from_outside_raises_names_its_line(cluster: Cluster) -> None:
    line = inspect.getsourcelines(Faulty.begin_round)[1] + 1
    with pytest.raises(RequestFailed, match=rf"faulty failed: ZeroDivisionError: .*{__name__}.py:{line}\)$"):
        cluster.generate("import os", strategy=f"{__name__}:Faulty", max_new_tokens=4)
    assert len(cluster.generate("import os", max_new_tokens=4).tokens) == 4


@dataclass(frozen=True)
class OutOfBounds(Parameters):
    out_share: Annotated[float, "a share", 0, 1] = 1.5


class BadDefault(Nameless):
    name = "bad_default"
    summary = "a default out of its bounds"
    parameters = OutOfBounds


@dataclass(frozen=True)
class BoundedParameters(Parameters):
    bounded_share: Annotated[float, "a share", 0.25, 1] = 0.5


class Bounded(Nameless):
    name = "bounded"
    summary = "a float with bounds"
    parameters = BoundedParameters


def test_a_float_has_the_bounds_that_it_declares() -> None:
    known = parameters_of(strategy_class(f"{__name__}:Bounded"))
    assert known["bounded_share"].range == "0.25 to 1"
    assert set_parameters(Params(), ["bounded_share=1"], known, "bounded").flat()["bounded_share"] == 1
    for value in ("0.2", "1.01", "nan", "inf", "-inf", "1e400", "x", ""):
        with pytest.raises(UsageError, match=r"bounded_share must be"):
            set_parameters(Params(), [f"bounded_share={value}"], known, "bounded")
    for wrong in (float("nan"), float("inf"), "0.5", True, None):
        with pytest.raises(UsageError, match="bounded_share must be"):
            Params(bounded_share=wrong)
    with pytest.raises(UsageError, match="segment must be a whole number"):
        Params(segment=2.5)


def _raises(kind: type[BaseException]) -> property:
    def fails(self: Faulty) -> int:
        raise kind("nowhere")

    return property(fails)


def _no_init(self: Faulty, *values: object) -> None:
    """Forget to call that of Strategy."""


def _adds_for_ever(self: Faulty) -> None:
    while True:
        self.builder.add(1, 0)


@pytest.mark.parametrize(("member", "value", "says"), [
    ("max_in_flight", _raises(KeyError), "failed: KeyError"),
    ("wants_stage_times", _raises(KeyError), "failed: KeyError"),
    ("prompt_taps", _raises(SystemExit), "failed: SystemExit"),
    ("max_in_flight", None, "has a max_in_flight of None, not a number of segments"),
    ("max_in_flight", 0, "has a max_in_flight of 0, not a number of segments"),
    ("prompt_taps", "abc", "has prompt_taps of 'abc', not a tuple of layers"),
    ("__init__", _no_init, "has no params: its __init__ has to call that of Strategy"),
    ("next_segment", _adds_for_ever, "failed: ValueError: more than [0-9]+ rows of which none became text"),
])
def test_what_a_strategy_is_made_of_is_checked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, member: str,
                                               value: object, says: str) -> None:
    """What is wrong ends the request alone."""
    made = type("Made", (Faulty,), {"name": "made", "begin_round": lambda self: None, member: value,
                                    "__module__": __name__})
    monkeypatch.setitem(globals(), "Made", made)
    with pytest.raises(RequestFailed, match=f"^the strategy made {says}"):
        cluster.generate("import os", strategy=f"{__name__}:Made", max_new_tokens=4)
    assert len(cluster.generate("import os", max_new_tokens=4).tokens) == 4


MINE = """
import my_sibling
from flowspec_edge import Segment, TreeStrategy

class MyStrategy(TreeStrategy):
    name = "mine"
    summary = "a chain, verified whole"

    def begin_round(self):
        self.expand([self.tree.root], levels=my_sibling.LEVELS, width=1, keep=4)

    def next_segment(self):
        if self.drafting or self.tree.root.number >= 0:
            return None
        return self.send(self.tree.pop_unsent(self.tree.size), root=True)
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a strategy, and with files that have the names of libraries."""
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text(MINE, encoding="utf-8")
    (tmp_path / "my_sibling.py").write_text("LEVELS = 4", encoding="utf-8")
    for name in ("random", "jinja2", "numpy", "torch", "bitsandbytes", "flash_attn", "not_installed"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py was run')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flowspec(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command as it is installed, whose path does not begin with the current directory."""
    script = "import sys; sys.path.remove(''); from flowspec_edge.cli.main import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True,
                          check=False, timeout=300, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_a_strategy_of_the_current_directory_is_found_and_its_example_runs(directory: Path) -> None:
    listed = flowspec("strategies", "my_package.module:MyStrategy", cwd=directory)
    assert listed.returncode == 0, listed.stderr
    [example] = re.findall(r"^Example: flowspec (.*)$", listed.stdout, re.MULTILINE)
    pasted = shlex.split(example)
    assert pasted[pasted.index("--strategy") + 1] == "my_package.module:MyStrategy"
    done = flowspec(*pasted, "--max-new-tokens", "8", cwd=directory)
    assert (done.returncode, "8 tokens" in done.stderr) == (0, True), done.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_processes_find_a_strategy_of_the_current_directory(directory: Path) -> None:
    run = flowspec("bench", "run", "--strategies", "my_package.module:MyStrategy,autoregressive", "--jobs",
                   "2", "--limit", "2", "--max-new-tokens", "8", cwd=directory)
    assert run.returncode == 0, run.stderr
    assert "mine" in run.stdout


def test_a_file_with_the_name_of_a_library_is_named(directory: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{directory / 'jinja2.py'} was not read")):
        strategy_class("jinja2:Mine")


def test_other_files_of_the_current_directory_are_not_found(directory: Path) -> None:
    code = """if True:
        import importlib, importlib.util, sys
        sys.path.remove('')
        from flowspec_edge.strategies.registry import strategy_class
        strategy_class("my_package.module:MyStrategy")
        for name in ("random", "jinja2", "not_installed"):
            try:
                importlib.import_module(name)
            except ImportError:
                pass
        print(*sorted(name for name, module in sys.modules.items()
                      if (getattr(module, "__file__", None) or "").startswith(sys.argv[1])))
        assert "torch" not in sys.modules  # which a strategy does not need: it would take seconds
        for name in ("numpy", "torch", "bitsandbytes", "flash_attn"):
            found = importlib.util.find_spec(name)
            assert not found or not found.origin.startswith(sys.argv[1]), found"""
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True,
                          check=False, timeout=300, cwd=directory,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.split() == ["my_package", "my_package.module", "my_sibling"], done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in strategy_names() if ":" not in name])
def test_the_example_of_a_strategy_is_understood(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from flowspec_edge.cli.common.listing import strategies

    strategies(name)
    [example] = re.findall(r"^Example: flowspec generate (.*)$", capsys.readouterr().out, re.MULTILINE)
    _, flag, chosen, *setting = shlex.split(example)
    assert (flag, chosen) == ("--strategy", name)
    declared = strategy_class(name).parameters
    given = set_parameters(Params(), setting[1:], parameters_of(strategy_class(name)), name)
    assert given.select(declared) == Params().select(declared)


def test_arguments_that_are_nearly_right(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="'deepth'; did you mean depth"):
        Params(deepth=3)
    for make in (Cluster.virtual, Cluster.local):
        with pytest.raises(UsageError, match="99 stages"):
            make("demo", stages=99).generate("import os", max_new_tokens=1)


def test_spans_are_those_of_virtual_time() -> None:
    with Cluster.local("demo", stages=2) as local, pytest.raises(UsageError, match="virtual time"):
        assert local.spans
