"""A package beside this one brings a strategy and a kind of draft model, by entry points alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

RECORD = dedent('''
    from flowspec_edge.model.draft_kind import DraftKind

    TWIN = DraftKind("twin", "twin", "twin head", "twin_drafter", (0, 32), choice=9, charged_as="twin_pass_ms",
                     layers=1, usual="one layer", recognise=lambda config, shapes: "twin" in config)
''')
STRATEGY = dedent('''
    from dataclasses import dataclass
    from typing import Annotated

    from flowspec_edge.strategies.flowspec import FlowSpec


    @dataclass(frozen=True)
    class TwinParameters(FlowSpec.parameters):
        twin_levels: Annotated[int, "levels of a tree"] = 2


    class Twin(FlowSpec):
        name = "twin_spec"
        title = "Twin"
        summary = "as flowspec, with a head of its own"
        drafter = "twin"
        parameters = TwinParameters


    class Untitled(FlowSpec):
        name = "untitled"
''')
DRAFTER = dedent('''
    from flowspec_edge.drafting.eagle.eagle2 import Eagle2Format

    FORMAT = Eagle2Format()
''')
BENCH = dedent('''
    import json, sys
    from pathlib import Path
    from flowspec_edge.cli.main import main
    from flowspec_edge.device_profile import load_profile, render
    from flowspec_edge.model.opened import OpenModel
    from flowspec_edge.strategies.registry import title_of

    model, out = map(Path, sys.argv[1:])
    assert "torch" not in sys.modules
    assert (title_of("twin_spec"), title_of("flowspec"), title_of("no_such")) == ("Twin", "FlowSpec", "no_such")
    assert main(["strategies"]) == main(["strategies", "twin_spec"]) == 0

    own = out / "own"
    (own / "twin").mkdir(parents=True)
    (own / "target").symlink_to(model / "target")
    for file in (model / "eagle2").iterdir():
        (own / "twin" / file.name).symlink_to(file)
    config = json.loads((model / "eagle2" / "config.json").read_text())
    (own / "twin" / "config.json").unlink()
    (own / "twin" / "config.json").write_text(json.dumps({**config, "twin": True}))
    assert [kind.name for kind in OpenModel(own).drafts] == ["twin"]

    def bench(directory, *options):
        file = out / "bench.json"
        assert main(["bench", "run", "--model", str(directory), "--prompts", str(out / "p.jsonl"), "--limit", "1",
                     "--max-new-tokens", "6", "--json", str(file), "--strategies", "twin_spec", *options]) == 0
        report = json.loads(file.read_text())
        [row] = report["rows"]
        assert (row["strategy"], row["draft"], row["identical"]) == ("twin_spec", "twin", True), row
        return report, row["tokens_per_second"]

    (out / "p.jsonl").write_text(json.dumps({"prompt": "import os\\n"}))
    report, usual = bench(own, "--set", "draft=own", "--set", "twin_levels=3")
    assert report["settings"]["twin_levels"] == 3
    assert report["settings"]["spd_width"] == 1

    # Its pass is charged as the profile says, and by its layers where it says nothing.
    profile = load_profile("paper-7b")  # 80 ms for eight layers, 5 ms for lm_head
    assert abs(profile.draft_seconds("twin", 0) - 0.015) < 1e-9
    (out / "slow.toml").write_text(render(profile).replace("[draft]", "[draft]\\ntwin_pass_ms = 400"))
    assert load_profile(str(out / "slow.toml")).draft_seconds("twin", 0) == 0.4
    assert bench(own, "--set", "draft=own", "--profile", str(out / "slow.toml"))[1] < usual

    sharded = out / "sharded"
    assert main(["models", "shard", "--model", str(model / "target"), "--draft", str(own / "twin"), "--stages", "2",
                 "--out", str(sharded)]) == 0
    bench(sharded, "--stages", "2")
    assert main(["plan", "--model", str(own), "--devices", "orin-nano-8gb:2", "--dtype", "fp16", "--strategies",
                 "twin_spec"]) == 0
    assert main(["generate", "x", "--model", str(model), "--strategy", "twin_spec", "--max-new-tokens", "2"]) == 2
''')
# What stands at the entry point "bad", and the line that refuses it.
BAD = {
    "nowhere:KIND": "cannot load the kind of draft model nowhere:KIND: ModuleNotFoundError",
    "os:sep": "os:sep is not a kind of draft model",
    "bad_kinds:OTHER": "bad_kinds:OTHER is named 'other', but its entry point 'bad'",
    "bad_kinds:PLACE": "needs a directory of its own",
    "bad_kinds:TIME": "is charged as bad_pass_ms, and does not say how many layers",
    "bad_kinds:LAYERS": "its own time is bad_pass_ms",
}
BAD_KINDS = dedent('''
    from flowspec_edge.model.draft_kind import DraftKind

    OTHER = DraftKind("other", "other", "head", "x", (0, 1))
    PLACE = DraftKind("bad", "eagle2", "head", "x", (0, 1))
    TIME = DraftKind("bad", "bad", "head", "x", (0, 1), charged_as="bad_pass_ms")
    LAYERS = DraftKind("bad", "bad", "head", "x", (0, 1), layers=2)
''')


def install(site: Path, name: str, entry_points: str, **modules: str) -> None:
    """Write a package as pip installs it."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, text in modules.items():
        (site / f"{module}.py").write_text(text)


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(site)})


@pytest.mark.slow
def test_a_package_brings_a_strategy_and_its_draft_model(model: Path, tmp_path: Path) -> None:
    install(tmp_path / "site", "twin", "[flowspec.strategies]\ntwin_spec = twin:Twin\nuntitled = twin:Untitled\n"
                                       "[flowspec.draft_kinds]\ntwin = twin_record:TWIN\n",
            twin=STRATEGY, twin_record=RECORD, twin_drafter=DRAFTER)
    done = python(tmp_path / "site", BENCH, str(model), str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "as flowspec, with a head of its own" in done.stdout
    assert "twin_levels" in done.stdout
    assert re.search(r"^twin_spec +twin ", done.stdout, re.MULTILINE)  # of the plan
    assert "twin_spec drafts with twin/, which" in done.stderr


def test_a_title_is_not_inherited_with_another_name(tmp_path: Path) -> None:
    install(tmp_path, "twin", "[flowspec.strategies]\nuntitled = twin:Untitled\n", twin=STRATEGY)
    done = python(tmp_path, "from flowspec_edge.strategies.registry import title_of\nprint(title_of('untitled'))")
    assert done.stdout == "untitled\n", done.stderr


def test_a_kind_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    program = dedent("""
        import sys
        from flowspec_edge.errors import UsageError
        from flowspec_edge.model import draft_kinds
        assert "bad" in draft_kinds.DRAFT_KINDS and "bad_kinds" not in sys.modules
        try:
            draft_kinds.stored_kinds()
        except UsageError as error:
            print(error)
    """)
    for number, (place, says) in enumerate(BAD.items()):
        site = tmp_path / str(number)
        install(site, "bad", f"[flowspec.draft_kinds]\nbad = {place}\n", bad_kinds=BAD_KINDS)
        done = python(site, program)
        assert says in done.stdout, done.stderr
        assert done.stdout.count("\n") == 1
