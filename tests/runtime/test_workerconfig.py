"""What a stage is told when it starts: its file names a wrong key, and keeps what is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec_edge.errors import UsageError
from flowspec_edge.runtime.workerconfig import WorkerConfig


@pytest.mark.parametrize(("text", "fault"), [
    ('stage = 1', "missing key"), ('nonsense = 1', "unknown key 'nonsense'"), ("stage = ", "not valid TOML"),
])
def test_a_bad_configuration_names_the_key(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "w.toml").write_text(text)
    with pytest.raises(UsageError, match=fault):
        WorkerConfig.load(tmp_path / "w.toml")


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = WorkerConfig(instance='v"1\\', stage=1, stages=2, model="/ä/b c", control="a", listen="b",
                          next="c", lost_after_s=2.5, control_key="<>{}%$#@")
    (tmp_path / "w.toml").write_text(config.dump(), encoding="utf-8")
    assert WorkerConfig.load(tmp_path / "w.toml") == config
