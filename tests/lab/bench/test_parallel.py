"""Figures computed by several processes are those of one, to the last digit and in the same order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.cli.main import main
from flowspec_edge.d0.request import Request
from flowspec_edge.device_profile import load_profile
from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.bench import parallel
from flowspec_edge.lab.bench.parallel import ParallelRun, PipelineTask, Workplace
from flowspec_edge.lab.plain import PlainDecoder


@pytest.fixture(scope="module", autouse=True)
def processes_for_all() -> Iterator[None]:
    """Joblib's, which take seconds to load the libraries; a run ends them, and here the last one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "_end_processes", lambda: None)
        yield
    parallel._end_processes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("command", [
    pytest.param(["bench", "run", "--temperatures", "0,1", "--repeats", "2", "--warmup", "1"],
                 marks=pytest.mark.slow),
    pytest.param(["bench", "run", "--arrival-rate", "0.5"], marks=pytest.mark.slow),
    ["sweep", "bandwidth=50,200"],
    pytest.param(["sweep", "stages=1,2"], marks=pytest.mark.slow)], ids=" ".join)
def test_the_report_of_two_processes_is_that_of_one(model: Path, tmp_path: Path, command: list[str]) -> None:
    command = [*command, "--model", str(model), "--strategies", "flowspec,autoregressive", "--limit", "2",
               "--max-new-tokens", "6"]
    if not command[1].startswith("stages"):
        command += ["--stages", "2"]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert main([*command, "--json", str(one)]) == 0
    assert main([*command, "--json", str(two), "--jobs", "2"]) == 0
    assert one.read_bytes() == two.read_bytes()
    half = json.loads(one.read_text())
    assert half["complete"]
    assert main([*command, "--json", str(two), "--jobs", "2", "--resume"]) == 0  # nothing is missing
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.slow
@pytest.mark.nightly
def test_the_report_of_two_dask_workers_is_that_of_one_process(model: Path, tmp_path: Path) -> None:
    """A benchmark and a sweep, one after the other on the same workers."""
    options = ["--model", str(model), "--strategies", "flowspec_plus,flowspec", "--stages", "2",
               "--limit", "2", "--max-new-tokens", "6"]
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, local_directory=tmp_path
                      ) as cluster:
        for command in (["bench", "run"], ["sweep", "bandwidth=50,200"]):
            one, two = tmp_path / "one.json", tmp_path / "two.json"
            assert main([*command, *options, "--json", str(one)]) == 0
            assert main([*command, *options, "--json", str(two), "--dask", cluster.scheduler_address]) == 0
            assert json.loads(one.read_text())["complete"]
            assert one.read_bytes() == two.read_bytes()
            # Both computed, each with as many torch threads as Dask counts on it.
            with Client(cluster) as client:
                threads = client.run(_threads_of_loaded_models)
            assert list(threads.values()) == [1, 1]


def _threads_of_loaded_models() -> int:
    """On a worker; 0 if it has loaded none."""
    import torch

    from flowspec_edge.lab.bench import parallel

    return torch.get_num_threads() if parallel._loaded.cache_info().currsize else 0


def test_real_time_needs_the_cores_for_itself(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run", "--model", str(model), "--clock", "wall", "--jobs", "2"]) == 2
    assert "--jobs and --dask compute in virtual time only" in capsys.readouterr().err


def test_tasks_are_computed_in_order_and_errors_arrive(model: Path) -> None:
    run = ParallelRun(Workplace(model, "fp32"), jobs=2)
    requests = [Request([5, 6, length], "flowspec", length) for length in range(1, 6)]
    bad = Request([1], "no_strategy", 3)
    cluster = run.cluster(2, load_profile("paper-7b"))

    def ask() -> list[list[int]]:
        return [cluster.generate(request).tokens for request in requests] + [
            run.plain(request)[0] for request in requests]

    assert ask() == [[]] * 10
    cluster.generate(bad)
    plain = PlainDecoder(model)
    expected = [plain.generate(list(r.prompt), r.max_new_tokens, r.sampling)[0] for r in requests]
    with run:
        assert ask() == expected * 2
        with pytest.raises(FlowspecError, match="no strategy 'no_strategy'"):
            cluster.generate(bad)


def test_the_dry_run_and_the_measurement_agree(model: Path) -> None:
    run = ParallelRun(Workplace(model, "fp32"), jobs=1)  # in this process, when its results are asked for
    run.plain(Request([3], max_new_tokens=1))
    with run, pytest.raises(AssertionError, match="another order"):
        run.plain(Request([4], max_new_tokens=1))
    assert PipelineTask((Request([3]),)) == PipelineTask((Request([3]),))
