"""What a change costs in files: each dummy is added to a copy of the package, in few files, and is tried there.

Strategies and kinds of draft models cost none of the package's own: test_from_outside.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
Edit = Callable[[str], str]  # from a file's text


def replaced(before: str, after: str) -> Edit:
    """Of what the file has once."""
    def edit(old: str) -> str:
        assert old.count(before) == 1, before
        return old.replace(before, after)
    return edit


def inserted(text: str, before: str) -> Edit:
    return replaced(before, text + before)


@dataclass(frozen=True)
class Change:
    """``edits`` by file below ``flowspec_edge``; ``probe``: a program that fails if the change is not complete, with
    MODEL, PROMPTS and OUT as its arguments."""

    edits: Mapping[str, Edit]
    probe: str


CHANGES = {
    "family": Change({
        # A family of transformers that this package does not run, whose layers are Llama's with biases.
        "model/families.py": inserted('    Family("seed_oss", form=LayerForm(query_biases=True)),\n',
                                      '    Family("mistral", {'),
    }, """
import json, shutil, sys, torch
from pathlib import Path
from flowspec_edge.cli.main import main
model, prompts, out = map(Path, sys.argv[1:])

def bench(directory, *options):
    file = out / "bench.json"
    assert main(["bench", "run", "--model", str(directory), "--prompts", str(prompts), "--limit", "1",
                 "--max-new-tokens", "6", "--json", str(file), *options]) == 0
    [row] = json.loads(file.read_text())["rows"]
    assert row["identical"], row
    return row

from transformers import AutoModelForCausalLM, SeedOssConfig
shutil.copytree(model / "target", out / "target")
(out / "target" / "model.safetensors").unlink()
old = json.loads((model / "target" / "config.json").read_text())
names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "eos_token_id", "bos_token_id")
torch.manual_seed(0)
made = AutoModelForCausalLM.from_config(SeedOssConfig(**{name: old[name] for name in names}, head_dim=16))
for parameter in made.parameters():
    if parameter.ndim == 2:
        torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
made.save_pretrained(out / "target")
bench(out / "target", "--strategies", "autoregressive", "--stages", "2")
sharded = out / "sharded"
assert main(["models", "shard", "--model", str(out / "target"), "--out", str(sharded), "--stages", "2"]) == 0
bench(sharded, "--strategies", "autoregressive", "--stages", "2")
"""),
    "check": Change({
        "boards/probe/system_rules.py": lambda text: text + (
            "\n\ndef dummy(system: SystemFacts) -> Finding:\n"
            "    return Finding(\"dummy\", \"warning\", \"nothing\", \"do nothing\")\n"),
        "boards/probe/checks.py": inserted(
            '    Check("dummy", Subject, "warning", _DOCTOR, lambda it: [rules.dummy(it.system)]),\n',
            '    Check("apt hold", Subject, "warning", _DOCTOR,'),
    }, """
from flowspec_edge.boards.probe.checks import Subject, judge
from flowspec_edge.boards.probe.facts import BoardFacts, system_facts
facts = BoardFacts(system=system_facts({"disks": {"/": {"device": 1, "free": 10**12, "writable": True}}}))
for place in ("bare", "installed", "here"):
    assert "dummy" in {finding.check for finding in judge(place, Subject(facts))}, place
"""),
    "check of a GPU": Change({
        "boards/gpu_check/operation_check.py": lambda text: text + (
            "\n\n@_rounded\ndef dummy(device: torch.device, dtype: torch.dtype) -> float:\n"
            "    return float(torch.zeros(2, dtype=dtype, device=device).abs().max())\n"),
        "boards/probe/checks.py": inserted(
            '    _operation("dummy", "dummy", dtype="fp16"),\n', '    _operation("topk", "topk"),\n'),
    }, """
from flowspec_edge.boards.doctor.gpu_report import GpuReport, describe
from flowspec_edge.boards.probe.checks import CHECKS, judge
[found] = judge("operations", describe("cpu"), [check for check in CHECKS if check.name == "dummy"])
assert (found.check, found.state, found.error) == ("dummy", "ok", 0.0), found
told = GpuReport("cpu", "CPU", None, {"operations": [found]}).as_json()
assert [check["name"] for check in told["checks"]] == ["dummy"]
"""),
    "message field": Change({
        "messages.py": replaced("and has a free slot.\"\"\"\n\n    session: int\n    epoch: int\n    run: int\n",
                                "and has a free slot.\"\"\"\n\n    session: int\n    epoch: int\n    run: int\n"
                                "    hint: int = 0\n"),
        "transport/codec.py": replaced("m.Credit: _RUN,", 'm.Credit: {**_RUN, "hint": Int()},'),
    }, """
from flowspec_edge.messages import Credit
from flowspec_edge.transport.codec import decode, encode
assert decode(encode(Credit(1, 0, 2, hint=7))) == Credit(1, 0, 2, hint=7)
"""),
}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_touches_few_files(what: str, model: Path, tmp_path: Path) -> None:
    change, copy = CHANGES[what], tmp_path / "copy"
    shutil.copytree(ROOT / "flowspec_edge", copy / "flowspec_edge", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("deploy", "profiles", "models", "pyproject.toml"):
        (copy / name).symlink_to(ROOT / name)
    for name, edit in change.edits.items():
        file = copy / "flowspec_edge" / name
        file.write_text(edit(file.read_text()))
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "import os\\n"}\n')
    out.mkdir()
    done = subprocess.run([sys.executable, "-c", change.probe, str(model), str(prompts), str(out)],
                          cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-3000:]
