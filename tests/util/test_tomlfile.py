"""The lines of keys, in files that are built with known lines, and in the project's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec_edge.errors import UsageError
from flowspec_edge.model.catalogue import Catalogue
from flowspec_edge.util.resources import resource_dir
from flowspec_edge.util.tomlfile import KeyPath, key_lines, load_toml, nearest_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = [ROOT / "pyproject.toml", resource_dir("deploy") / "cluster.example.toml",
         *sorted(resource_dir("profiles").glob("*.toml"))]


def places(value: Any, where: KeyPath = ()) -> set[KeyPath]:
    """The locations of everything in a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {where}.union(*(places(inner, (*where, key)) for key, inner in inside))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_that_were_not_written_for_this(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines, rows = key_lines(text), text.split("\n")
    assert set(lines) == places(tomllib.loads(text)) - {()}
    for where, line in lines.items():
        name = next(part for part in reversed(where) if isinstance(part, str))
        if isinstance(where[-1], str) or f"[{name}]" in rows[line - 1]:
            assert name in rows[line - 1].split("#")[0]
        else:  # an element of an array, in the statement of its key
            assert line >= lines[where[:-1]]


WORDS = st.text(st.sampled_from("ab#=[]{},.'\" \n\\é"), max_size=8)
ESCAPED = st.builds(lambda t: t.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"), WORDS)
LITERAL = st.builds(lambda t: t.replace("'", "").replace("\n", " "), WORDS)
SCALARS = st.one_of(
    st.sampled_from(["1", "-2.5e3", "true", "1979-05-27 07:32:00", "0x1F", "inf", '""', "''", '""""""',
                     '"""\n[[device]]\nname = 1 # no\n"""', "'''\n[x]\n'''", '""""quoted"""""',
                     "'''it''s'''''",
                     '"""a \\\n   b \\""" """']),
    ESCAPED.map('"{}"'.format), LITERAL.map("'{}'".format),
    WORDS.map(lambda t: '"""\n' + t.replace("\\", "\\\\").replace('"', '\\"') + '"""'))
GAPS = st.sampled_from(["", " ", "\n", "\n  # a ] comment, = \n\n", "\t"])


@st.composite
def values(draw: st.DrawFn, depth: int = 2) -> str:
    kind = draw(st.sampled_from(["scalar", "scalar", "array", "inline"])) if depth else "scalar"
    if kind == "scalar":
        return draw(SCALARS)
    inner = draw(st.lists(values(depth - 1), max_size=3))
    if kind == "inline":
        return "{" + ", ".join(f"k{i} = {value}" for i, value in enumerate(inner)) + "}"
    text = "".join(draw(GAPS) + value + draw(GAPS) + "," for value in inner)
    return "[" + (text if draw(st.booleans()) else text[:-1]) + draw(GAPS) + "]"


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[KeyPath, int]]:
    """A file, and the line of every key and table in it."""
    text, lines, table = "", {}, ()
    counts: dict[str, int] = {}
    for number in range(draw(st.integers(0, 8))):
        text += draw(st.sampled_from(["", "\n", "# [no]\n", "  "]))
        here = text.count("\n") + 1
        kind = draw(st.sampled_from(["pair", "pair", "pair", "table", "array", "dotted", "quoted"]))
        end = draw(st.sampled_from(["\n", " # x = 1\n", "  \n"]))
        if kind == "table":
            table = ("tables", f"t{number}")
            text += f"[ tables . 't{number}' ]{end}"
            lines[table] = here
        elif kind == "array":
            name = draw(st.sampled_from(["device", "other"]))
            table = (name, counts.get(name, 0))
            counts[name] = counts.get(name, 0) + 1
            text += f"[[{name}]]{end}"
            lines[table] = here
        else:
            key, where = {"pair": (f"p{number}", (f"p{number}",)),
                          "dotted": (f"d{number} . 'x.y'", (f"d{number}", "x.y")),
                          "quoted": (f'"q\\u0041={number}"', (f"qA={number}",))}[kind]
            text += f"{key}{draw(st.sampled_from(['=', ' = ']))}{draw(values())}{end}"
            lines[(*table, *where)] = here
    return text, lines


@given(documents())
def test_any_file(document: tuple[str, dict[KeyPath, int]]) -> None:
    text, written = document
    found = key_lines(text)
    assert {where: found[where] for where in written} == written
    assert set(found) == places(tomllib.loads(text)) - {()}
    assert key_lines(text.replace("\n", "\r\n")) == found


def test_elements_of_an_array_have_lines_of_their_own() -> None:
    text = 'a = [  # one\n  "x",\n\n  [1, 2],\n  """y\n]""",\n]\nb = 3\n'
    assert key_lines(text) == {("a",): 1, ("a", 0): 2, ("a", 1): 4, ("a", 1, 0): 4, ("a", 1, 1): 4,
                               ("a", 2): 5, ("b",): 8}


def test_the_nearest_line() -> None:
    lines = key_lines("a = 1\n[[device]]\nname = 'x'\n[[device]]\n[[device.disk]]\nkind = 'y'\n")
    assert nearest_line(lines, ["device", 1, "disk", 0, "kind"]) == 6
    assert nearest_line(lines, ["device", 1, "disk", 0, "size"]) == 5
    assert nearest_line(lines, ["device", 0, "size"]) == 2
    assert nearest_line(lines, ["device"]) == 2
    assert nearest_line(lines, ["cluster"]) is None


def test_an_unknown_key_of_an_entry_names_the_known_ones(tmp_path: Path) -> None:
    """Of a file whose tables have names of their own: the catalogue."""
    (tmp_path / "c.toml").write_text('["a.b"]\ntarget = "x/y"\nsmal = "x/z"\nconfig = {}\n')
    with pytest.raises(UsageError, match=r"c.toml:3: unknown key 'a.b.smal': did you mean 'small'\?"):
        load_toml(tmp_path / "c.toml", Catalogue)
