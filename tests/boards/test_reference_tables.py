"""docs/reference/cluster.md and profiles.md have every key of the two files, with its default."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from flowspec_edge.boards.inventory import ClusterSettings, DeviceEntry
from flowspec_edge.device_profile import Profile

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def rows_below(heading: str, file: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    table = (REFERENCE / file).read_text().split(f"\n{heading}\n")[1].split("\n|---")[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[1:]]


@pytest.mark.parametrize(("heading", "fields"), [("## [cluster]", ClusterSettings), ("## [[device]]", DeviceEntry)])
def test_every_key_of_a_cluster_file_is_there_with_its_default(heading: str, fields: type[BaseModel]) -> None:
    found: dict[str, str] = {}
    for keys, default, _ in rows_below(heading, "cluster.md"):
        names = re.findall(r"`(\w+)`", keys)
        shared = default.split(", ") if ", " in default else [default] * len(names)
        found |= dict(zip(names, shared, strict=True))
    assert set(found) == set(fields.model_fields)
    for name, written in found.items():
        field = fields.model_fields[name]
        expected = "must be given" if field.is_required() else json.dumps(field.default)
        if not field.is_required() and field.default in (None, "") and not written:
            continue  # left out
        assert written.strip("`") == expected, name


def test_every_key_of_a_profile_is_there() -> None:
    rows = rows_below("## The file", "profiles.md")
    written: dict[str, set[str]] = {}
    table = ""
    for cells in rows:
        table = cells[0].strip("`[]()") or table
        where = [table]
        if " in " in cells[1]:  # a key of two tables
            where = re.findall(r"\[(\w+)\]", cells[1])
        for name in where:
            written.setdefault(name, set()).update(re.findall(r"`(\w+)`", cells[1]))
    tables = {name: field for name, field in Profile.model_fields.items() if name in written and name != "top"}
    assert written.pop("top") == set(Profile.model_fields) - set(tables)
    assert not written.pop("conditions")  # for information
    for name, keys in written.items():
        [model] = [found for found in (tables[name].annotation, *getattr(tables[name].annotation, "__args__", ()))
                   if isinstance(found, type) and issubclass(found, BaseModel)]
        assert {key for key in keys if key != "KIND_pass_ms"} == set(model.model_fields), name
