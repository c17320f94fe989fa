"""Renews the reference in docs/reference/python.md from the docstrings of ``flowspec_edge.api``.

    python docs/build_api.py [--check]
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_origin, get_type_hints

from flowspec_edge import api

DOCUMENT = Path(__file__).resolve().parent / "reference" / "python.md"
BEGIN = "<!-- from here on made by build_api.py -->\n"
# Members that drivers call, and no user of the API.
_FOR_DRIVERS = {
    "Profile": ("stage_seconds", "draft_seconds", "pass_ms", "verify_seconds", "link_seconds", "check_stages"),
    "Params": ("select", "flat", "largest_segment", "largest_tree"), "Restrictions": ("tokens",),
    "Sampling": ("least_log",), "Penalties": ("cost",),
    "SegmentBuilder": ("skip_prune", "pop_returned", "sent_numbers", "runs")}
# What callers use: its arguments and errors are on the page. What strategies use has the rest in ``help()``.
_WHOLE = ("Cluster", "Completion", "Params", "Penalties", "Profile", "Request", "Restrictions", "Sampling")
_MADE_BY = {api.Request: api.Cluster.request}  # what says of its arguments what the fields are
_IN_THE_GUIDE = ("Strategy",)  # docs/guides/write-a-strategy.md says what its members are for
_ROLE = re.compile(r":(?:class|meth|func|attr):`~?([^`]+)`")


def reference() -> str:
    """Return a section for every public name: its signature, its docstring, its members."""
    lines: list[str] = []
    for name in sorted(api.__all__, key=str.lower):
        lines += section(name, getattr(api, name))
    return "\n".join(lines) + "\n"


def section(name: str, thing: Any) -> Iterator[str]:
    yield from (f"### `{name}`", "")
    if not inspect.isclass(thing):
        yield from (f"`{name}{signature(thing)}`", "")
    said = own_comments(thing) if dataclasses.is_dataclass(thing) else {}
    whole = name in _WHOLE or not inspect.isclass(thing)
    yield from text(thing, said) if whole else first(text(thing, said))
    if not inspect.isclass(thing) or issubclass(thing, Exception):
        return
    if dataclasses.is_dataclass(thing):
        yield from fields(thing, said) if whole else in_a_line(fields(thing, said))
    bases = [base for base in thing.__mro__[1:] if getattr(api, base.__name__, None) is base]
    listed = False  # whether a list of members is to be ended
    names: list[str] = []  # of members that the guide describes
    for member, value in vars(thing).items():
        if any(inspect.getdoc(getattr(base, member, None)) == inspect.getdoc(getattr(thing, member)) for base in bases):
            continue  # described there
        if member in _FOR_DRIVERS.get(name, ()):
            continue
        if not member.startswith("_") and (inspect.getdoc(value) or inspect.isabstract(thing)):
            shown = list(described(member, value, whole))
            if name in _IN_THE_GUIDE:
                names += [f"`{member}`"] if shown else []
                continue
            yield from shown
            listed = listed or bool(shown and not whole)
    if names:
        yield f"Members: {', '.join(names)}."
    if listed or names:
        yield ""


def first(lines: Iterator[str]) -> Iterator[str]:
    """Yield the first paragraph, and a table of names."""
    written = list(lines)
    yield from written[: written.index("") + 1] if "" in written else written
    if "```" in written:
        begin = written.index("```")
        yield from (*written[begin : written.index("```", begin + 1) + 1], "")


def in_a_line(lines: Iterator[str]) -> Iterator[str]:
    """Yield the fields' names and defaults, without what a comment says of them."""
    names = []
    for line in lines:
        if line.startswith(("With", "```")):
            if line.startswith("With"):
                yield from (line, "")
        elif line:
            name, _, default = line.partition("  # ")[0].partition(" = ")
            name = name.partition(":")[0]
            names.append(f"`{name}={default}`" if default and "field(" not in default else f"`{name}`")
    if names:
        yield from (f"Fields: {', '.join(names)}.", "")


def own_comments(thing: Any) -> dict[str, str]:
    """Return what the docstring's table says of the fields, if it has a line for fields alone."""
    names = {field.name for field in dataclasses.fields(thing)}
    for paragraph in (inspect.getdoc(thing) or "").split("\n\n"):
        lines = re.split(r"\n(?=\w)", paragraph)
        found = dict(line.split(None, 1) for line in lines if re.match(r"\w+  +\S", line))
        if len(found) == len(lines) and found.keys() <= names:
            return {name: " ".join(said.split()).replace("``", "") for name, said in found.items()}
    return {}


def fields(thing: Any, said: dict[str, str]) -> Iterator[str]:
    """Yield the fields with what the names do not say, but for those of a base that is documented itself.

    Beside a name is a line of the docstring's table, an annotation, or a comment in the source.
    """
    source = inspect.getsource(thing)
    hints = get_type_hints(thing, include_extras=True)
    base = next((one for one in thing.__mro__[1:] if getattr(api, one.__name__, None) is one
                 and dataclasses.is_dataclass(one)), None)
    inherited = {field.name for field in dataclasses.fields(base)} if base else set()
    if made_by := _MADE_BY.get(thing):
        arguments = inspect.signature(made_by).parameters
        inherited = {field.name for field in dataclasses.fields(thing) if field.name in arguments}
        named = ", ".join(f"`{name}`" for name in arguments if name in inherited)
        yield from (f"Fields that `{made_by.__qualname__}` describes ({named}; the prompt as token ids), and:", "")
    if base:
        yield from (f"With the fields of [`{base.__name__}`](#{base.__name__.lower()})" + (
            ", and:" if inherited < {field.name for field in dataclasses.fields(thing)} else "."), "")
    yield "```python"
    for field in dataclasses.fields(thing):
        if field.name in inherited:
            continue
        found = re.search(rf"^    {field.name}: .*$", source, re.MULTILINE)
        if get_origin(hints[field.name]) is Annotated:
            kind = re.match(r"Annotated\[([\w |]+)", str(field.type))
            assert kind
            yield f"{field.name}: {kind[1]} = {field.default!r}  # {hints[field.name].__metadata__[0]}"
        else:
            written = found.group().strip() if found else field.name
            yield f"{written}  # {said[field.name]}" if field.name in said and "#" not in written else written
    yield from ("```", "")


def described(name: str, value: Any, whole: bool) -> Iterator[str]:
    """Yield a member's signature and docstring, of which only the first sentence unless ``whole``."""
    if isinstance(value, property):
        shown, function = f"{name}` (property)", value.fget
    elif isinstance(value, classmethod | staticmethod) or inspect.isfunction(value):
        function = getattr(value, "__func__", value)
        shown = f"{name}{signature(function)}`"
    else:
        return
    if whole:
        yield from (f"#### `{shown}", "", *text(function))
    else:
        said = re.split(r"(?<=[.;])\s", next(text(function), ""))[0]
        yield f"- `{shown}: {said[:1].lower()}{said[1:].rstrip('.;')}" if said else f"- `{shown}"


def signature(function: Any) -> str:
    found = inspect.signature(function)
    parts = []
    for p in found.parameters.values():
        if p.name not in ("self", "cls"):
            if p.kind is p.KEYWORD_ONLY and "*" not in parts:
                parts.append("*")
            parts.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    returned = "" if found.return_annotation == "None" else f" -> {found.return_annotation}"
    return f"({', '.join(parts)}){returned}"


def text(thing: Any, said: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Yield a docstring's paragraphs; indented ones, and tables of names, as they are.

    The table ``said`` is left out.
    """
    written = inspect.getdoc(thing) or ""
    if dataclasses.is_dataclass(thing) and written.startswith(f"{getattr(thing, '__name__', '')}("):
        return  # the one that dataclass makes
    for paragraph in _ROLE.sub(r"``\1``", written).split("\n\n"):
        if said and paragraph.split(None, 1)[0] in said and re.match(r"\w+  +\S", paragraph):
            continue
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
