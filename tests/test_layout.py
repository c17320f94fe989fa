"""The layout of the source: directions of imports, circles, names, what starts processes.  Read from the source;
nothing is imported here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from kits.package_sources import PACKAGE, trees

ROOT = Path(__file__).resolve().parent.parent

# What each part of the package may import beside itself.
FOUNDATION = {"errors", "messages", "util", "device_profile", "sampling", "model"}
DEVICES = {"tree", "strategies", "drafting", "stage", "transport"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "messages": set(),
    "util": {"errors", "messages"},
    "device_profile": {"errors", "util", "model"},
    "sampling": {"errors", "util"},
    "model": {"errors", "util", "sampling"},
    "tree": FOUNDATION,
    "strategies": FOUNDATION | {"tree"},
    "drafting": FOUNDATION | {"tree", "stage"},
    "stage": FOUNDATION | {"tree"},
    "transport": FOUNDATION | {"tree"},
    "sharding": FOUNDATION | {"tree", "drafting", "stage"},
    "d0": FOUNDATION | DEVICES,
    "drivers": FOUNDATION | DEVICES | {"d0"},
    "serving": FOUNDATION | DEVICES | {"d0", "drivers"},
    "boards": FOUNDATION | DEVICES | {"d0", "drivers", "sharding"},
    "lab": FOUNDATION | DEVICES | {"d0", "drivers", "sharding", "boards"},
    "api": FOUNDATION | DEVICES | {"d0", "drivers", "boards", "lab"},
    "cli": FOUNDATION | DEVICES | {"d0", "drivers", "serving", "boards", "lab", "sharding"},
    "__main__": {"cli", "util"},
}
# The sub-packages and modules of a package, lowest first: each may import those before it.  Every child of a
# package that is listed here must be listed; the others are checked for circles alone.
ORDER: dict[str, list[str]] = {
    "stage": ["quant", "weights", "layers", "rows", "families", "layer_graphs", "output_head", "forward", "shard",
              "engine", "preparation", "counters", "core"],
    "drivers": ["observe", "stage", "ring", "processes", "virtual"],
    "serving": ["sse", "access_log", "admission", "metrics", "openai", "door", "ollama", "anthropic",
                "conversation", "dashboard", "access_control", "intake", "app", "server"],
    "boards": ["paths", "inventory", "commands", "images", "links", "ssh_stages", "transfer", "gpu_check",
               "probe", "planning", "measurement", "services", "deploy", "doctor"],
    "lab": ["stage_attention", "plain", "emulation", "links", "first_token", "predictions", "record", "token_check",
            "training", "spd", "bench", "reproduce"],
    "lab.bench": ["samples", "exactness", "estimates", "rows", "paper_results", "axes", "results", "host_info",
                  "tasks", "runner", "near_ties", "parallel", "weight_loss", "styles", "tables", "compare",
                  "paper_tables", "timeline", "plots"],
    "cli": ["common", "bench", "generate", "serve", "boards", "deploy", "models",
            "main"],
}
SIMULATES = ("drivers.virtual", "lab")  # handed in, so that nothing that a board runs imports it
MAY_SIMULATE = ("api", "cli", "lab", "drivers.virtual")
PURE = ("tree", "strategies")  # they decide and do not act: no clock, no socket, no tensor library
ACTS = {"time", "datetime", "random", "socket", "select", "selectors", "asyncio", "threading",
        "multiprocessing", "subprocess", "os", "pathlib"}
TENSORS = {"torch", "transformers", "safetensors", "tokenizers", "zmq"}


@cache
def imported(module: str, at_once: bool = False) -> set[str]:
    """Full names of everything a module imports, in functions and for type checkers, too, unless ``at_once``."""
    path, tree = trees()[module]
    found: set[str] = set()
    for node in run_at_once(tree) if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def run_at_once(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below that an import runs: not functions, nor what is for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if for_types or isinstance(child, ast.FunctionDef):
            continue
        yield child
        yield from run_at_once(child)


@cache
def imported_modules(module: str, at_once: bool = False) -> set[str]:
    """The modules of the package among them."""
    found = set()
    for name in imported(module, at_once):
        if name.split(".")[0] == "flowspec_edge":
            ours = name.removeprefix("flowspec_edge").lstrip(".")
            found.add(ours if ours in trees() else ours.rpartition(".")[0])
    return found - {module}


def within(module: str, package: str) -> str:
    """The child of ``package`` in which a module lies; "" if it is elsewhere, or the package itself."""
    inside = module.removeprefix(package + ".") if package else module
    return inside.split(".")[0] if not package or inside != module else ""


def packages() -> list[str]:
    """Every package below ``flowspec_edge``, "" for itself."""
    return [name for name, (path, _) in trees().items() if path.name == "__init__.py"]


def circles(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """Groups of nodes that reach one another, one line each (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            group = sorted(stack[at:])
            del stack[at:]
            if len(group) > 1:
                found.append(" <-> ".join(group))

    for node in edges:
        if node not in index:
            visit(node)
    return sorted(found)


def edges_between_children(package: str) -> dict[str, dict[str, list[str]]]:
    """For each child of a package, the other children that it imports, and where."""
    edges: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, (path, _) in trees().items():
        child = within(module, package)
        for other in sorted(imported_modules(module)):
            target = within(other, package)
            if child and target and target != child:
                edges[child][target].append(f"{path.relative_to(ROOT)} imports {other}")
    return edges


def assert_none(wrong: list[str]) -> None:
    """Show every offence, where pytest would show the first few."""
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def test_every_part_is_known() -> None:
    assert_none(sorted({within(module, "") for module in trees()} - {"", *MAY_IMPORT}))


def test_parts_import_only_what_is_below_them() -> None:
    wrong = [line for part, targets in edges_between_children("").items() for target, lines in targets.items()
             for line in lines if target not in MAY_IMPORT.get(part, set())]
    assert_none(wrong)


def test_sub_packages_import_only_those_before_them() -> None:
    wrong = []
    for package, order in ORDER.items():
        children = {within(module, package) for module in trees()} - {""}
        wrong += [f"{package}/{child} has no place in ORDER" for child in sorted(children - set(order))]
        for child, targets in edges_between_children(package).items():
            for target, lines in targets.items():
                if {child, target} <= set(order) and order.index(target) > order.index(child):
                    wrong += [f"{package}: {child} -> {target}: {line}" for line in lines]
    assert_none(wrong)


def test_no_circle_between_sub_packages() -> None:
    wrong = [f"{package or 'flowspec_edge'}: {circle}" for package in packages()
             for circle in circles(edges_between_children(package))]
    assert_none(wrong)


def test_no_circle_between_modules() -> None:
    assert_none(circles({module: imported_modules(module) for module in trees()}))


def test_the_check_for_circles_finds_them() -> None:
    edges = {"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": ["e"], "e": ["d"], "f": ["a"]}
    assert circles(edges) == ["b <-> c", "d <-> e"]


def inside(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_simulation_is_handed_in() -> None:
    wrong = [f"{module} imports {other}" for module in trees() if not inside(module, MAY_SIMULATE)
             for other in sorted(imported_modules(module)) if inside(other, SIMULATES)]
    assert_none(wrong)


def loaded_with(modules: Iterable[str]) -> set[str]:
    """The modules of the package that an import of ``modules`` runs."""
    loaded, todo = set[str](), list(modules)
    while todo:
        module = todo.pop()
        if module not in loaded:
            loaded.add(module)
            todo += imported_modules(module, at_once=True)
            todo += [".".join(module.split(".")[:end]) for end in range(module.count(".") + 1)]
    return loaded


def test_what_a_board_runs_loads_no_simulation() -> None:
    """The command line may simulate, but not in what the services' commands load."""
    loaded = loaded_with(["cli.serve.daemons"])
    assert "cli.common" in loaded <= trees().keys()
    assert_none([module for module in sorted(loaded) if inside(module, SIMULATES)])


def test_a_public_class_is_defined_once() -> None:
    places = defaultdict(list)
    for module, (_, tree) in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    wrong = [f"{name}: {', '.join(modules)}" for name, modules in places.items() if len(modules) > 1]
    assert_none(wrong)


def test_every_package_says_what_lives_in_it() -> None:
    assert_none([package for package in packages() if not ast.get_docstring(trees()[package][1])])


# What is called in one part of the package alone.
CALLED_IN = {"Manifest.read": "model", "load_config": "model"}
# Names of kinds of draft models and of families that are not literals of their records or modules: values of
# published configurations, of GGUF's metadata on tokenizers, and of reports; names of the strategy "spd" and of the
# parameter "ngram".
NAMED_ELSEWHERE = {
    "model.draft_kinds": {"drafting.block.formats", "lab.bench.compare", "lab.reproduce.records",
                          "strategies.parameters"},
    "lab.spd.kind": {"lab.bench.styles", "lab.reproduce.catalogue", "lab.reproduce.records"},
    "model.families": {"drafting.block.formats", "drafting.eagle.eagle3_formats", "serving.openai.fields",
                       "model.gguf.tokenizer"},
}


def name_of(function: ast.expr) -> str:
    """"f" or "C.f"; "" for other expressions."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def test_manifests_and_configurations_are_read_by_an_opened_model() -> None:
    wrong = []
    for module, (path, tree) in trees().items():
        for node in ast.walk(tree):
            called = name_of(node.func) if isinstance(node, ast.Call) else ""
            if within(module, "") != CALLED_IN.get(called, within(module, "")):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {called}")
    assert_none(wrong)


@pytest.mark.parametrize("owner", NAMED_ELSEWHERE)
def test_a_record_alone_spells_its_name(owner: str) -> None:
    records = {"DraftKind", "Family"}
    names = set()
    for node in ast.walk(trees()[owner][1]):
        if isinstance(node, ast.Call) and name_of(node.func) in records:
            names |= {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    names -= {""}
    assert len(names) > 5 or owner.startswith("lab.")
    assert names
    wrong = [f"{path.relative_to(ROOT)}:{node.lineno} spells {node.value!r}"
             for module, (path, tree) in trees().items() if module not in NAMED_ELSEWHERE[owner] | {owner}
             for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in names]
    assert_none(wrong)


def test_the_house_does_not_know_the_strategy_from_outside() -> None:
    """Beside the laboratory, only the command that trains its module names SPD."""
    wrong = [str(path.relative_to(ROOT)) for module, (path, _) in trees().items()
             if not inside(module, ["lab", "cli.models.train", "cli.models.commands"])
             and "spd" in path.read_text(encoding="utf-8").lower()]
    assert_none(wrong)


@pytest.mark.parametrize("part", PURE)
def test_decisions_use_numpy_and_nothing_that_acts(part: str) -> None:
    may_import = {"flowspec_edge", "numpy"} | sys.stdlib_module_names - ACTS
    assert_none([f"{module} imports {name}" for module in trees() if within(module, "") == part
                 for name in sorted(imported(module)) if name.split(".")[0] not in may_import])


@pytest.mark.parametrize("part", PURE)
def test_nothing_below_decisions_needs_a_tensor_library(part: str) -> None:
    reached = loaded_with(module for module in trees() if within(module, "") == part)
    wrong = [f"{module} imports {name}" for module in sorted(reached) for name in sorted(imported(module, True))
             if name.split(".")[0] in TENSORS]
    assert_none(wrong)


# Programs that are not Python take such options, too.
NOT_PYTHON = {"sh", "nvpmodel", "install", "-d", "-I"}  # install -d -m; python -I is isolated itself
MAY_START = {"util.interpreter", "boards.probe.onboard.system"}  # the latter asks for -I, on a board


def words_before_options(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """For each "-c" or "-m" in a list or among arguments, and each "-" in a list: the line, and the word
    before it."""
    for node in ast.walk(tree):
        given = (node.elts if isinstance(node, (ast.List, ast.Tuple)) else
                 node.args if isinstance(node, ast.Call) else [])
        options = ("-c", "-m") if isinstance(node, ast.Call) else ("-c", "-m", "-")
        for before, option in pairwise(given):
            if isinstance(option, ast.Constant) and option.value in options:
                word = before.value if isinstance(before, ast.Constant) else ast.unparse(before)
                yield option.lineno, str(word)


def test_one_module_knows_how_an_interpreter_is_started() -> None:
    """So that none imports from the current directory: ``tests/util/test_interpreter.py``."""
    assert_none([f"{name}:{line} after {word}" for name, (_, tree) in trees().items() if name not in MAY_START
                 for line, word in words_before_options(tree) if word not in NOT_PYTHON])


def test_what_starts_processes_for_us_is_guarded() -> None:
    for name, (path, _) in trees().items():
        text = path.read_text(encoding="utf-8")
        starts = ("get_context(" in text or "joblib.Parallel(" in text or "ProcessPoolExecutor" in text
                  or "set_start_method" in text)
        assert not starts or "guarded_starts(" in text, name


def test_stages_know_no_transformers() -> None:
    """Boards need neither its imports' memory nor their seconds; the tests take it as the oracle."""
    assert_none([f"{module} imports {name}" for module in trees() if module.startswith("stage.")
                 for name in imported(module) if name.split(".")[0] == "transformers"])


def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    code = ("import sys, flowspec_edge.cli.main\n"
            "print([m for m in ('torch', 'transformers', 'zmq', 'tokenizers') if m in sys.modules])")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/explained/architecture.md"])
def test_documents_name_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = sorted(set(re.findall(r"`((?:[a-z0-9_]+/)*[a-z0-9_]+(?:\.py|/))`", text)))
    assert named
    assert_none([name for name in named if not any((root / name).exists() for root in (PACKAGE, ROOT))])


def test_the_index_of_experiments_has_every_entry_newest_first() -> None:
    folder = ROOT / "docs" / "experiments"
    entries = {f"{path.name}#{anchor}" for path in folder.glob("*.md")
               for heading in re.findall(r"^## (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
               for anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")]}  # GitHub's
    rows = re.findall(r"^\| (\d{4}-\d\d-\d\d) \| \[.*\]\((\S+)\) \| .+ \|$",
                      (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(link for _, link in rows) == sorted(entries)
    assert [date for date, _ in rows] == sorted((date for date, _ in rows), reverse=True)


def test_no_document_is_empty() -> None:
    files = [ROOT / name for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()]
    assert_none([str(path) for path in files or ROOT.glob("*.md") if not path.read_text(encoding="utf-8").strip()])
