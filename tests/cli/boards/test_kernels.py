"""flowspec device kernels: a real measurement of small products."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowspec_edge.cli.main import main


@pytest.mark.slow
@pytest.mark.nightly
def test_a_table_with_a_winner_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels.json"
    assert main(["device", "kernels", "--shape", "64x128", "--rows", "1,16", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    written = json.loads(out.read_text(encoding="utf-8"))
    assert set(written["kinds"]) == {"fp32", "bf16", "fp16", "int4", "nf4", "fp4"}
    assert all(found["works"] for found in written["kinds"].values())
    assert (written["device"], written["shape"], written["rows"]) == ("cpu", [64, 128], [1, 16])
    lines = said.out.splitlines()
    assert lines[0].startswith("A product with 64 x 128 weights on CPU, ")
    assert lines[1].split() == ["weights", "1", "row,", "ms", "16", "rows,", "ms", "error"]
    assert [line.split()[0] for line in lines[2:8]] == list(written["kinds"])
    assert f"Fastest in 4 bits at 16 rows: {written['fastest']}, " in said.out
    assert f"Written to {out}" in said.out.replace("\n", "")
