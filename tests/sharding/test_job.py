"""Sharding: the files written, from every format, and resumption after every kind of interruption."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kits import network_beds
from kits.sharded_models import all_tensors, as_bin, cut, edit
from kits.tiny_model_dir import tiny_model_dir
from kits.tiny_models import tiny_llama
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.manifest import Manifest
from flowspec_edge.sharding import job
from flowspec_edge.sharding.job import JOURNAL, finished, run, total_size
from flowspec_edge.sharding.plan import ShardingPlan, make_plan, ranges_for, recipe_for
from flowspec_edge.sharding.source import open_source
from flowspec_edge.stage.quant.schemes import scheme

_CLONE_NEWNS = 0x00020000


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("plain"), layers=3)


def plan_of(model: Path, dtype: str | None = "int4", stages: int = 2) -> ShardingPlan:
    source = open_source(str(model))
    return make_plan(source, recipe_for(source, dtype), ranges_for(source.layers, stages, None))  # type: ignore[arg-type]


def content(directory: Path) -> dict[str, str]:
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in directory.rglob("*") if path.is_file()}


def test_every_tensor_and_every_file_is_there(full: Path, tmp_path: Path) -> None:
    done: list[int] = []
    plan = plan_of(full, "bf16", 3)
    manifest = run(plan, tmp_path / "out", done.append)
    assert sum(done) == total_size(plan) == sum(part.size for part in manifest.parts.values())
    listed = {file.path for part in manifest.parts.values() for file in part.files}
    assert {*listed, "manifest.json"} == set(content(tmp_path / "out"))
    for name in manifest.parts:
        manifest.check(name)
    truth = load_file(full / "target" / "model.safetensors")
    for stage in ("stage-1", "stage-2", "stage-3"):
        found = all_tensors(tmp_path / "out" / stage)
        index = json.loads((tmp_path / "out" / stage / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(found)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
        for name, tensor in found.items():
            assert torch.equal(tensor, truth.pop(name).bfloat16())
    assert list(truth) == ["lm_head.weight"]
    head = load_file(tmp_path / "out" / "draft" / "target" / "model.safetensors")
    assert torch.equal(head["lm_head.weight"], truth["lm_head.weight"].bfloat16())
    for part in ("eagle2", "draft-lm", "spd"):
        assert content(tmp_path / "out" / "draft" / part) == content(full / part)
    assert (tmp_path / "out" / "draft" / "target" / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_slices_quantise_to_what_the_whole_does(plain: Path, tmp_path: Path, kind: str) -> None:
    cut(plain, tmp_path / "out", dtype=kind)
    stored = all_tensors(tmp_path / "out")
    how = scheme(kind)  # type: ignore[arg-type]
    for name, weight in load_file(plain / "model.safetensors").items():
        if name.endswith("proj.weight"):
            for suffix, tensor in how.quantise(weight).items():
                assert torch.equal(stored[f"{name.removesuffix('weight')}{suffix}"], tensor)
        else:
            assert torch.equal(stored[name], weight.bfloat16())


def test_every_format_gives_the_same_shards(plain: Path, tmp_path: Path) -> None:
    several, pickled = tmp_path / "several", Path(shutil.copytree(plain, tmp_path / "pickled"))
    shutil.copytree(plain, several)
    (several / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(plain).save_pretrained(several, max_shard_size="60KB")
    as_bin(pickled, 2)
    found = [content(Path(cut(model, tmp_path / f"out-{i}").directory))
             for i, model in enumerate((plain, several, pickled))]
    for files in found:
        del files["manifest.json"]  # holds the source's name
    assert found[0] == found[1] == found[2]


# -- stopping and going on ---------------------------------------------------------------------


def forked(child: Callable[[], None]) -> int | None:
    """Call ``child`` in a fork of this process; returns its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads, which do nothing
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    process.join(60)
    return process.exitcode


def run_until(plan: ShardingPlan, out: Path, at: int) -> None:
    """Run in a separate process, killed with SIGKILL after so many bytes."""
    written = 0

    def count(done: int) -> None:
        nonlocal written
        written += done
        if written >= at:
            os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        torch.set_num_threads(1)
        run(plan, out, count)

    assert forked(child) == -signal.SIGKILL


def test_killed_anywhere_it_goes_on(full: Path, tmp_path: Path) -> None:
    plan = plan_of(full)
    truth = content(Path(run(plan, tmp_path / "truth").directory))
    size = total_size(plan)
    for share in range(0, 10, 2):
        out = tmp_path / f"out-{share}"
        run_until(plan, out, size * share // 10 + 1)
        assert not (out / "manifest.json").exists()
        assert (out / JOURNAL).is_file()
        if share >= 6:
            run_until(plan, out, size * (share + 9) // 20)  # and again, on the way
        journal = (out / JOURNAL).read_text().splitlines()
        before = {path: (out / path).stat().st_mtime_ns
                  for path in (json.loads(line).get("path") for line in journal) if path}
        done: list[int] = []
        run(plan, out, done.append)
        assert content(out) == truth
        assert sum(done) == size
        assert all((out / path).stat().st_mtime_ns == at for path, at in before.items())  # not written twice
    assert finished(plan, tmp_path / "out-0") is not None


def test_an_exception_leaves_no_partial_file(full: Path, tmp_path: Path) -> None:
    plan = plan_of(full)

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "out", interrupt)
    assert list(content(tmp_path / "out")) == [JOURNAL]
    run(plan, tmp_path / "out")


def test_a_torn_journal_and_lost_files(full: Path, tmp_path: Path) -> None:
    plan = plan_of(full)
    truth = content(Path(run(plan, tmp_path / "truth").directory))
    out = tmp_path / "out"
    run_until(plan, out, total_size(plan) // 2)
    lines = (out / JOURNAL).read_bytes().splitlines(keepends=True)
    (out / JOURNAL).write_bytes(b"".join(lines[:-1]) + lines[-1][:-7])
    (out / json.loads(lines[1])["path"]).unlink()
    run(plan, out)
    assert content(out) == truth


@pytest.mark.parametrize(("make", "complaint"), [
    (lambda out: (out.mkdir(), (out / "notes").touch()), r"is not empty \(it holds notes\)"),
    (lambda out: out.touch(), "cannot write .*: File exists"),
    (lambda out: out.parent.joinpath("file").touch() or out.symlink_to("file/out"), "cannot write"),
])
def test_directories_that_cannot_be_used(plain: Path, tmp_path: Path, make: Callable[[Path], object],
                                         complaint: str) -> None:
    out = tmp_path / "out"
    make(out)
    with pytest.raises(UsageError, match=complaint):
        run(plan_of(plain), out)


def test_another_request_is_refused(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_until(plan_of(plain), out, 40_000)
    with pytest.raises(UsageError, match="unfinished"):
        run(plan_of(plain, "nf4"), out)
    run(plan_of(plain), out)
    with pytest.raises(UsageError, match="already holds"):
        finished(plan_of(plain, "nf4"), out)
    assert finished(plan_of(plain), tmp_path / "nowhere") is None
    with pytest.raises(UsageError, match="sharded already"):
        open_source(str(out))


def test_one_at_a_time(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_until(plan_of(plain), out, 40_000)
    with (out / JOURNAL).open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process is writing"):
            run(plan_of(plain), out)
    run(plan_of(plain), out)


@network_beds.needs("a small file system", "" if os.geteuid() == 0 else "only root may mount one")
def test_a_full_disk_is_foreseen_or_said(plain: Path, tmp_path: Path) -> None:
    """On a real file system of 200 kB, in a mount namespace of a forked process."""
    out = tmp_path / "disk" / "out"
    out.parent.mkdir()
    plan, heard = plan_of(plain, "fp16"), multiprocessing.get_context("fork").Queue()

    def child() -> None:
        torch.set_num_threads(1)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNS):
            heard.put(f"cannot unshare: {os.strerror(ctypes.get_errno())}")
            return
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", out.parent], check=True)
        try:
            run(plan, out)
        except FlowspecError as error:
            heard.put(str(error))
        (out.parent / "ballast").write_bytes(bytes(150_000))
        job._require_room = lambda *_: None  # what is foreseen may come true after the check, too
        try:
            run(plan, out)
        except FlowspecError as error:
            heard.put(str(error))
        heard.put(str([path.name for path in out.rglob("*.partial")]))

    forked(child)
    said = [heard.get(timeout=10)]
    if said[0].startswith("cannot unshare"):
        pytest.skip(said[0])
    said += [heard.get(timeout=10), heard.get(timeout=10)]
    assert re.search(r"no room in .*: 0\.\d+ GB are to be written and 0\.00 GB are free: make room", said[0])
    assert said[1].startswith(f"no room to write {out}/")
    assert "run the same command again to go on" in said[1]
    assert said[2] == "[]"


# -- weights that need care --------------------------------------------------------------------


def test_what_fp16_cannot_hold(plain: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(plain, tmp_path / "copy"))
    edit(copy, model__norm__weight=torch.full((64,), 7e4))
    with pytest.raises(FlowspecError, match=r"model\.norm\.weight .*fp16.*--dtype"):
        cut(copy, tmp_path / "out")
    cut(copy, tmp_path / "out-bf16", dtype="bf16")


def test_what_cannot_be_quantised_is_named(plain: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(plain, tmp_path / "copy"))
    edit(copy, model__layers__2__mlp__down_proj__weight=torch.full((64, 128), float("nan")))
    with pytest.raises(FlowspecError, match=r"tensor model\.layers\.2\..*down_proj\.weight: .*not a number"):
        cut(copy, tmp_path / "out", dtype="int4")


def test_the_manifest_says_where_it_came_from(plain: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(cut(plain, tmp_path / "out", dtype="nf4").directory)
    assert manifest.source.name == plain.name
    assert manifest.source.config_sha256 == hashlib.sha256((plain / "config.json").read_bytes()).hexdigest()
    assert (manifest.model_type, manifest.layers) == ("llama", 3)
    assert (manifest.hidden_width, manifest.vocabulary) == (64, 97)
    assert manifest.compute_dtype == "bf16"
