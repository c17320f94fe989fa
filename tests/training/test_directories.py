"""Unusable directories are refused before anything is trained."""

import pytest
from tiny_dir import tiny_model_dir
from train_demo import train_demo

from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import resolve_model
from flowspec_edge.training.spd import train_spd
from flowspec_edge.training.text_files import claim_part, make_directory


@pytest.mark.parametrize("check", [make_directory, claim_part])
def test_a_file_in_the_way_is_one_error(tmp_path, check):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "spd"):
        with pytest.raises(UsageError, match=r"cannot make the directory .*; give another one"):
            check(path)
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_training_refuses_a_file_before_it_starts(tmp_path):
    model = resolve_model(tiny_model_dir(tmp_path / "model", layers=2, hidden=32, vocab=320))
    (tmp_path / "file").write_text("mine")
    for out, work in ((tmp_path / "file", None), (None, tmp_path / "file")):
        with pytest.raises(UsageError, match="a file is in the way"):
            train_demo(out or tmp_path / "demo", work=work, quick=True)
        with pytest.raises(UsageError, match="a file is in the way"):
            train_spd(model, out=out or tmp_path / "spd", work=work, quick=True)
    assert (tmp_path / "file").read_text() == "mine"
