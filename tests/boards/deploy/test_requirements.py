"""What a board's service takes, with and without a profile."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.planned_boards import D0_MB

from flowspec_edge.boards.deploy.resolve import process_bytes, resolve_deployment
from flowspec_edge.boards.doctor.model import needed_bytes
from flowspec_edge.boards.inventory import load_inventory
from flowspec_edge.util.resources import resource_dir

MB = 10**6
_FILE = """
[cluster]
name = "lab"
model = "demo"
torch_device = "{torch_device}"
[[device]]
name = "a"
address = "10.0.0.1"
role = "draft"
{profile}
[[device]]
name = "b"
address = "10.0.0.2"
role = "verify"
"""


def process_mb(directory: Path, torch_device: str, profile: str = "") -> float:
    """Of board a, by itself and as a part of what it needs."""
    def sizes(torch_device: str, profile: str) -> tuple[int, int]:
        file = directory / "cluster.toml"
        file.write_text(_FILE.format(torch_device=torch_device,
                                     profile=f'profile = "{profile}"' if profile else ""))
        deployment = resolve_deployment(load_inventory(file), file)
        return process_bytes(deployment, deployment.draft), needed_bytes(deployment)["a"]

    alone, whole = sizes(torch_device, profile)
    plain, least = sizes("cpu", "")
    assert whole - least == alone - plain
    return alone / MB


@pytest.mark.parametrize(("torch_device", "measured", "found"), [
    ("cpu", None, 240), ("cuda", None, 740), ("cuda:1", None, 740),
    ("cuda", "cuda", 1234), ("cpu", "cpu", 1234), ("cpu", "cuda", 240)])
def test_a_service_takes_more_with_cuda_and_a_profile_knows_best(
        torch_device: str, measured: str | None, found: float, tmp_path: Path) -> None:
    """``measured``: the device of a profile whose process takes 1234 MB."""
    if measured:
        text = (resource_dir("profiles") / "orin-nx-16gb.toml").read_text()
        text = text.replace("process_mb = 740", "process_mb = 1234").replace('"cuda"', f'"{measured}"')
        (tmp_path / "own.toml").write_text(text)
    assert process_mb(tmp_path, torch_device, "own.toml" if measured else "") == found + D0_MB
