"""Which draft model a strategy gets: its own kind, the one asked for, or the head that stands in."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec_edge.errors import UsageError
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.strategies.draft_choice import draft_kind
from flowspec_edge.strategies.params import Params
from flowspec_edge.strategies.registry import STRATEGIES, groups, groups_note, require_pipelines


def model(path: Path, *parts: str) -> OpenModel:
    for part in parts:
        (path / part).mkdir()
        (path / part / "config.json").write_text("{}")
    return OpenModel(path)


@pytest.mark.parametrize(("name", "asked", "parts", "kind"), [
    ("flowspec", "own", ("eagle2", "eagle3"), "eagle2"),
    ("flowspec", "own", ("eagle3",), "eagle3"),
    ("flowspec", "own", ("draft-lm",), "eagle2"),  # to be asked for by name
    ("flowspec", "eagle2", ("eagle3",), "eagle3"),
    ("flowspec", "eagle2", ("draft-lm",), "eagle2"),
    ("flowspec", "eagle3", ("eagle2",), "eagle3"),
    ("pearl", "own", ("eagle3",), "lm"),
    ("pearl", "eagle3", ("eagle3",), "eagle3"),
    ("spd", "eagle3", ("eagle3",), "spd"),
    ("autoregressive", "eagle3", ("eagle3",), None),
    ("megatron", "own", ("eagle2", "eagle3"), "eagle2"),
])
def test_kinds(tmp_path: Path, name: str, asked: str, parts: tuple[str, ...], kind: str | None) -> None:
    params = Params(draft=asked)  # type: ignore[arg-type]
    assert draft_kind(STRATEGIES[name], params, model(tmp_path, *parts)) == kind


@pytest.mark.parametrize(("asked", "parts"), [("eagle3", ("eagle2", "eagle3")), ("own", ("eagle3",))])
@pytest.mark.parametrize("name", ["megatron", "galaxy"])
def test_no_inner_states_from_devices_that_share_each_layer(tmp_path: Path, name: str, asked: str,
                                                            parts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot draft with the model's EAGLE-3 head") as caught:
        draft_kind(STRATEGIES[name], Params(draft=asked), model(tmp_path, *parts))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_groups_exist_in_virtual_time_only() -> None:
    assert groups(STRATEGIES) == ["megatron", "galaxy"]
    require_pipelines([name for name in STRATEGIES if name not in ("megatron", "galaxy")])
    with pytest.raises(UsageError, match=r"^galaxy exists in virtual time only.* try: flowspec bench run --strategies "
                                         r"chunk_pp,galaxy$"):
        require_pipelines(["flowspec", "galaxy"])


def test_a_table_says_once_how_groups_are_computed() -> None:
    assert groups_note(["galaxy", "flowspec", "galaxy"]) == "Galaxy: computed whole, charged as groups of devices"
    assert groups_note(["flowspec", "of_another_package"]) == ""
