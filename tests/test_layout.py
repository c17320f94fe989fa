"""The direction of imports, read from the source; nothing is imported here."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flowspec_edge"

# What each part may import beside itself and the modules at the top of the package.
BELOW_RUNTIME = {"tree", "strategies", "drafting", "stage", "transport"}
MAY_IMPORT = {
    "tree": set(),
    "strategies": {"tree"},
    "drafting": {"tree"},
    "stage": {"tree"},
    "transport": {"tree"},
    "training": {"tree", "drafting", "stage"},
    "sharding": {"tree", "drafting", "stage"},
    "runtime": BELOW_RUNTIME,
    "serving": BELOW_RUNTIME | {"runtime"},
    "fleet": BELOW_RUNTIME | {"runtime", "sharding"},
    "bench": BELOW_RUNTIME | {"runtime", "sharding", "fleet"},
    "cli": BELOW_RUNTIME | {"runtime", "serving", "fleet", "bench", "training", "sharding"},
}
PURE = ("tree", "strategies")  # decide, and do not act: no clock, no socket, no tensor library
NOT_PURE = {"time", "datetime", "random", "socket", "select", "selectors", "asyncio", "threading",
            "multiprocessing", "subprocess", "os", "pathlib"}
DATA = {"_data"}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if not DATA & set(p.relative_to(PACKAGE).parts))


def imports(path: Path) -> set[str]:
    """Full names of everything a file imports, wherever in the file it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part_of(path: Path) -> str:
    """The part a file belongs to; "" for the modules at the top of the package."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def imported_part(name: str) -> str | None:
    """The part that ``flowspec_edge.PART.…`` names; None for its top modules and other packages."""
    names = name.split(".")
    is_part = len(names) > 1 and names[0] == "flowspec_edge" and (PACKAGE / names[1]).is_dir()
    return names[1] if is_part else None


def test_every_part_is_known() -> None:
    assert {part_of(path) for path in modules()} - {""} <= set(MAY_IMPORT)


@pytest.mark.parametrize("part", ["", *MAY_IMPORT])
def test_a_part_imports_only_what_is_below_it(part: str) -> None:
    allowed = MAY_IMPORT.get(part, set()) | {part}
    wrong = [f"{path.relative_to(ROOT)} imports {name}" for path in modules() if part_of(path) == part
             for name in sorted(imports(path)) if (imported_part(name) or part) not in allowed]
    assert wrong == []


@pytest.mark.parametrize("part", PURE)
def test_decisions_use_numpy_and_nothing_that_acts(part: str) -> None:
    wrong = []
    for path in modules():
        if part_of(path) != part:
            continue
        for name in sorted(imports(path)):
            top = name.split(".")[0]
            ours = top == "flowspec_edge" and not name.startswith("flowspec_edge.tensors")
            plain = top in sys.stdlib_module_names and top not in NOT_PURE
            if not (ours or plain or top == "numpy"):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    code = ("import sys, flowspec_edge.cli.main\n"
            "print([m for m in ('torch', 'transformers', 'zmq', 'tokenizers') if m in sys.modules])")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_top_level_of_the_repository() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert top == {"flowspec_edge", "deploy", "profiles", "models", "tests", "docs", "pyproject.toml",
                   "Dockerfile.jetson", "README.md", "LICENSE", "Makefile", ".ci", ".gitignore"}
