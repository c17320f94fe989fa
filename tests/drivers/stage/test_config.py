"""The configuration file of a stage: an error names the wrong key, and writing then reading is exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec_edge.drivers.stage.config import WorkerConfig
from flowspec_edge.errors import UsageError
from flowspec_edge.util.tomlfile import load_toml


@pytest.mark.parametrize(("changes", "fault"), [
    ({"control": "tcp://192.0.2.1:7701"}, r"w\.toml:\d+: control: tcp://192.0.2.1:7701 is beyond loopback"),
    ({"listen": "tcp://0.0.0.0:7702"}, "listen: tcp://0.0.0.0:7702 is beyond loopback"),
    ({"next": "tcp://board:7702"}, "next: tcp://board:7702 is beyond loopback"),
])
def test_links_beyond_loopback_need_keys_or_a_word(tmp_path: Path, changes: dict[str, str], fault: str
                                                   ) -> None:
    settings = {"instance": "v1", "stage": 1, "stages": 2, "model": "m", "control": "tcp://127.0.0.1:1",
                "listen": "tcp://127.0.0.1:2", "next": "tcp://127.0.0.1:3", **changes}
    config = WorkerConfig.model_validate({**settings, "unencrypted": True})
    (tmp_path / "w.toml").write_text(config.dump())
    assert load_toml(tmp_path / "w.toml", WorkerConfig) == config
    (tmp_path / "w.toml").write_text(config.dump().replace("unencrypted = true", ""))
    with pytest.raises(UsageError, match=fault):
        load_toml(tmp_path / "w.toml", WorkerConfig)
    assert WorkerConfig.model_validate({**settings, "key_file": "k"}).key_file == "k"


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = WorkerConfig(instance='v"1\\', stage=1, stages=2, model="/ä/b c", control="a", listen="b",
                          next="c", lost_after_s=2.5, control_key="<>{}%$#@")
    (tmp_path / "w.toml").write_text(config.dump(), encoding="utf-8")
    assert load_toml(tmp_path / "w.toml", WorkerConfig) == config
