"""``flowspec bench`` with --clients and --arrival-rate: the file, resuming, tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.bench_reports import documented_fields

from flowspec_edge.cli.main import main


def bench(model: Path, out: Path, *arguments: str) -> int:
    return main(["bench", "run", "--model", str(model), "--limit", "2", "--stages", "2", "--strategies",
                 "autoregressive", "--max-new-tokens", "6", "--json", str(out), *arguments])


def test_the_file_holds_what_its_rows_are_computed_from(model: Path, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    path, single = tmp_path / "two.json", tmp_path / "one.json"
    assert bench(model, single) == 0
    capsys.readouterr()
    assert bench(model, path, "--clients", "2") == 0
    shown = capsys.readouterr().out
    one, two = (json.loads(p.read_text()) for p in (single, path))
    (row,) = two["rows"]
    documented = documented_fields("### With `--clients` or `--arrival-rate`")
    assert row.keys() - one["rows"][0].keys() == documented - {"ttft_s"}
    assert two["samples"][0].keys() - one["samples"][0].keys() == {"concurrent"}
    assert two["settings"] == {**one["settings"], "clients": 2}

    timings = [sample["concurrent"] for sample in two["samples"]]
    total = sum(len(t["token_s"]) for t in timings) / max(t["token_s"][-1] for t in timings)
    share = min(len(t["token_s"]) / t["token_s"][-1] / t["alone_tokens_per_second"] for t in timings)
    assert (row["clients"], row["arrival_rate"]) == (2, None)
    assert (row["total_tokens_per_second"], row["slowest_share"]) == pytest.approx((total, share))
    assert f"{total:.2f}" in shown
    assert f"{share:.2f}" in shown

    before = path.read_bytes()
    assert bench(model, path, "--clients", "2", "--resume") == 0  # nothing is missing
    assert path.read_bytes() == before
    assert bench(model, path, "--clients", "4", "--resume") == 2
    assert "was measured with other settings: clients differs (2 there, 4 here)" in capsys.readouterr().err

    assert main(["bench", "tables", "--from", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# Concurrent requests")
    assert "Table I" not in text
    [line] = [line for line in text.splitlines() if line.startswith("| autoregressive")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3:6] == ["2", f"{total:.2f}", f"{share:.2f}"]
    assert main(["bench", "plot", "--from", str(path), "--out", str(tmp_path / "f.svg")]) == 2
    assert "figures are of requests that run one by one" in capsys.readouterr().err
