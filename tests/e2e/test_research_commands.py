"""The researcher's path: every command that the documents on benchmarks show is run as it is written there.

Files and models that a reader brings are tiny ones of the same names, and the runs are shortened.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from kits import documents
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "two_chains"
GUIDES, REFERENCE = ROOT / "docs" / "guides", ROOT / "docs" / "reference"
RUN = [GUIDES / "research.md", GUIDES / "write-a-strategy.md", REFERENCE / "benchmarks.md", EXAMPLE / "README.md"]
DOCUMENTS = [*RUN, REFERENCE / "python.md", REFERENCE / "strategies.md"]
SHORT = {"--limit": "1", "--max-new-tokens": "4"}
_INLINE = re.compile(r"`((?:PYTHONPATH=\. )?flowspec [^`…]+)`")


def commands(document: Path, inline: bool = True) -> list[list[str]]:
    """The arguments of every ``flowspec …`` in code, without placeholders."""
    text = document.read_text(encoding="utf-8").split("## Reference")[0]
    lines = [*documents.commands(text), *(_INLINE.findall(text) if inline else [])]
    lines = [line.removeprefix("PYTHONPATH=. ") for line in lines]
    return [shlex.split(line)[1:] for line in lines if line.startswith("flowspec ")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.parent.name + "/" + path.name)
def test_every_command_and_option_exists(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown option is an error before --help is looked at."""
    found = commands(document)
    assert found
    for arguments in found:
        assert main([*arguments, "--help"]) == 0, (arguments, capsys.readouterr().err)
        assert "--help" in capsys.readouterr().out


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the documents name; the demonstration is replaced by a tiny model."""
    for name in ("mt_bench", "gsm8k"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"turns": [f"{name} "]}) + "\n")
    tiny_model_dir(tmp_path / "Llama-2-7b-chat-hf", layers=2, hidden=32)
    (tmp_path / "models").symlink_to(ROOT / "models")
    module = re.findall(r"```python\n(.*?)```", RUN[1].read_text(encoding="utf-8"), re.DOTALL)[0]
    (tmp_path / "one_chain.py").write_text(module, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return tmp_path


def shortened(arguments: list[str]) -> list[str]:
    """A GPU becomes the CPU, and a model to fetch the demonstration; of two values of an option the last counts."""
    given = [{"cuda": "cpu", "smollm2-135m": "demo"}.get(part, part) for part in arguments if part != "--chat"]
    if "--from" in given or given[:2] == ["bench", "compare"] or given in (["reproduce"], ["strategies"], ["profiles"]):
        return given
    if "timeline" in given:
        return [*given, "--model", "demo"]
    options = {"--max-new-tokens": SHORT["--max-new-tokens"]} if given[0] == "generate" else SHORT
    if "smollm2.flowrec" in given:  # the demonstration's first answer at 1 is empty, and record leaves its prompt out
        options = {**SHORT, "--temperatures": "0"}
    model = [] if {"--model", "--recording"} & {*given} else ["--model", "Llama-2-7b-chat-hf"]
    return [*given, *model, *(part for pair in options.items() for part in pair)]


@pytest.mark.soak
@pytest.mark.parametrize("document", RUN, ids=lambda path: path.name)
def test_every_command_runs(document: Path, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in commands(document, inline=False):
        if arguments[0] == "generate" and "two_chains" in arguments:  # a name that pip installs
            arguments[arguments.index("two_chains")] = "two_chains:TwoChains"
        assert main(shortened(arguments)) == 0, (arguments, capsys.readouterr().err)
    made = {path.suffix for path in desk.rglob("*") if path.is_file()}
    if document.name == "benchmarks.md":
        assert made >= {".json", ".md", ".csv", ".tex", ".pdf", ".svg", ".png"}
