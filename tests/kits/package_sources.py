"""The package's source, parsed once for all tests of a process that read it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "flowspec_edge"


@cache
def trees() -> dict[str, tuple[Path, ast.Module]]:
    """Module names below ``flowspec_edge``, such as "tree.draft_tree"; a package's is its ``__init__``'s."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if "_data" not in parts:
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path, ast.parse(path.read_text(encoding="utf-8"))
    return found
