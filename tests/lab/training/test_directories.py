"""Unusable directories are refused before anything is trained."""

from pathlib import Path

import pytest
from kits.tiny_model_dir import tiny_model_dir
from train_demo import train_demo

import flowspec_edge
from flowspec_edge.errors import UsageError
from flowspec_edge.lab.spd.training import train_spd
from flowspec_edge.lab.training.text_files import claim_part, claim_work, work_beside
from flowspec_edge.lab.training.train_head import HeadOptions, train_head_part
from flowspec_edge.model.opened import resolve_model
from flowspec_edge.util.files import make_directory
from flowspec_edge.util.resources import resource_dir


@pytest.mark.parametrize("check", [make_directory, claim_part, claim_work])
def test_a_file_in_the_way_is_one_error(tmp_path, check):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "spd"):
        with pytest.raises(UsageError, match="a file is in the way; give another"):
            check(path)
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_of_something_else_is_no_finished_part(tmp_path, monkeypatch):
    """What is there counts as made if it is complete; an empty directory is a place for it."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    claim_part(tmp_path / "empty")
    model = resolve_model(tiny_model_dir(tmp_path / "model", layers=2, hidden=32, vocab=320))
    monkeypatch.chdir(tmp_path / "empty")
    for out, says in (("../notes", r"\.\./notes holds something else.*; give another directory"),
                      (".", "is no name for a new directory"), ("..", "is no name for a new directory")):
        for train in (lambda out=Path(out): train_head_part(model, "eagle2", HeadOptions(quick=True),
                                                            "2026-01-02", out=out),
                      lambda out=Path(out): train_spd(model, out=out, quick=True)):
            with pytest.raises(UsageError, match=says):
                train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "model", "notes"]


def test_training_refuses_a_file_before_it_starts(tmp_path):
    model = resolve_model(tiny_model_dir(tmp_path / "model", layers=2, hidden=32, vocab=320))
    (tmp_path / "file").write_text("mine")
    for out, work in ((tmp_path / "file", None), (None, tmp_path / "file")):
        with pytest.raises(UsageError, match="a file is in the way"):
            train_demo(out or tmp_path / "demo", work=work, quick=True)
        with pytest.raises(UsageError, match="a file is in the way"):
            train_spd(model, out=out or tmp_path / "spd", work=work, quick=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_nothing_is_trained_into_the_package():
    """Its own models have a place for a head only where --out says so; the work is beside that place."""
    model = resolve_model("demo")
    for train in (lambda: train_head_part(model, "eagle3", HeadOptions(quick=True), "2026-01-02"),
                  lambda: train_spd(model, quick=True)):
        with pytest.raises(UsageError, match=r"demo came with flowspec-edge.*--out DIR"):
            train()
    assert not list(resource_dir("models").glob("*work*"))


def test_nor_where_a_path_leads_into_the_package(tmp_path):
    """Neither among its models nor in its code, by a link or by dots, for the result or for the work."""
    model, models, code = resolve_model("demo"), resource_dir("models"), Path(flowspec_edge.__file__).parent
    (tmp_path / "link").symlink_to(models)
    for inside in (models / "mine", code / "mine", code / "cli" / ".." / "mine", tmp_path / "link" / "mine"):
        for option, places in (("--out", {"out": inside, "work": tmp_path / "work"}),
                               ("--work", {"out": tmp_path / "out", "work": inside})):
            for train in (lambda p=places: train_head_part(model, "eagle3", HeadOptions(quick=True),
                                                           "2026-01-02", **p),
                          lambda p=places: train_spd(model, quick=True, **p)):
                with pytest.raises(UsageError, match=f"^{option} {inside} is inside flowspec-edge's own dir"):
                    train()
            assert not inside.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_the_work_is_beside_the_result(tmp_path):
    assert work_beside(tmp_path / "heads" / "mine") == tmp_path / "heads" / "mine-work"
