"""Renews the reference in docs/reference/python.md from the docstrings of ``flowspec_edge.api``.

    python docs/build_api.py [--check]
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from flowspec_edge import api

DOCUMENT = Path(__file__).resolve().parent / "reference" / "python.md"
BEGIN = "<!-- from here on made by build_api.py -->\n"
_ROLE = re.compile(r":(?:class|meth|func|attr):`~?([^`]+)`")


def reference() -> str:
    """A section for every public name: its signature, its docstring, its members."""
    lines: list[str] = []
    for name in sorted(api.__all__, key=str.lower):
        lines += section(name, getattr(api, name))
    return "\n".join(lines) + "\n"


def section(name: str, thing: Any) -> Iterator[str]:
    yield from (f"### `{name}`", "")
    if inspect.isclass(thing):
        yield from (f"From `{thing.__module__}`.", "")
    else:
        yield from (f"`{name}{signature(thing)}`", "")
    yield from text(thing)
    if not inspect.isclass(thing) or issubclass(thing, Exception):
        return
    if dataclasses.is_dataclass(thing):
        yield from fields(thing)
    for member, value in vars(thing).items():
        if not member.startswith("_") and (inspect.getdoc(value) or inspect.isabstract(thing)):
            yield from described(member, value)


def fields(thing: Any) -> Iterator[str]:
    """The fields with what the names do not say: an annotation, or a comment in the source."""
    source = inspect.getsource(thing)
    hints = get_type_hints(thing, include_extras=True)
    yield "```python"
    for field in dataclasses.fields(thing):
        found = re.search(rf"^    {field.name}: .*$", source, re.MULTILINE)
        if get_origin(hints[field.name]) is Annotated:
            kind = re.match(r"Annotated\[([\w |]+)", str(field.type))
            assert kind
            yield f"{field.name}: {kind[1]} = {field.default!r}  # {hints[field.name].__metadata__[0]}"
        else:
            yield found.group().strip() if found else field.name
    yield from ("```", "")


def described(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, property):
        yield from (f"#### `{name}` (property)", "")
        yield from text(value.fget)
    elif isinstance(value, classmethod | staticmethod) or inspect.isfunction(value):
        function = getattr(value, "__func__", value)
        yield from (f"#### `{name}{signature(function)}`", "")
        yield from text(function)


def signature(function: Any) -> str:
    found = inspect.signature(function)
    parts = []
    for p in found.parameters.values():
        if p.name not in ("self", "cls"):
            if p.kind is p.KEYWORD_ONLY and "*" not in parts:
                parts.append("*")
            parts.append(f"{p.name}: {p.annotation}" + ("" if p.default is p.empty else f" = {p.default!r}"))
    return f"({', '.join(parts)}) -> {found.return_annotation}"


def text(thing: Any) -> Iterator[str]:
    """A docstring's paragraphs; indented ones, and tables of names, as they are."""
    written = inspect.getdoc(thing) or ""
    if dataclasses.is_dataclass(thing) and written.startswith(f"{getattr(thing, '__name__', '')}("):
        return  # the one that dataclass makes
    for paragraph in _ROLE.sub(r"``\1``", written).split("\n\n"):
        if re.search(r"^(\w+|    .*)  +\S", paragraph, re.MULTILINE) or paragraph.startswith("    "):
            yield from ("```", *paragraph.splitlines(), "```", "")
        elif paragraph:
            yield from (" ".join(paragraph.split()).replace("``", "`"), "")


def main() -> int:
    before = DOCUMENT.read_text(encoding="utf-8")
    written = before[: before.index(BEGIN)] + BEGIN + "\n" + reference()
    if "--check" in sys.argv[1:]:
        return int(written != before)
    DOCUMENT.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
