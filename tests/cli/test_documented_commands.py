"""Every `flowspec` command that the documents show is one: its names, options and values are parsed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from kits import documents
from kits.command_options import refusal

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTS = sorted(path for path in DOCS.rglob("*.md") if "experiments" not in path.parts)
# docs/experiments is a log, whose commands are those of their day.


def flowspec_words(command: str) -> list[list[str]]:
    """The arguments of each ``flowspec`` in a line of shell."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = []
    current: list[str] | None = None
    for word in lexer:
        if set(word) <= set(";|&()<>"):
            current = None
        elif word.rpartition("/")[2] == "flowspec":
            current = []
            commands.append(current)
        elif current is not None:
            current.append(word)
    return commands


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(DOCS)))
def test_documented_commands_are_parsed(document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                                        ) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = [f"{command}: {message}" for command in documents.commands(document.read_text(encoding="utf-8"))
             for words in flowspec_words(command) if words and (message := refusal(words))]
    assert not wrong, "\n".join(wrong)


def test_what_is_wrong_is_found() -> None:
    assert flowspec_words("sudo .venv/bin/flowspec profiles > a.txt; sleep 5 && flowspec plan --json") == [
        ["profiles"], ["plan", "--json"]]
    assert not refusal(["plan", "--model", "llama-2-7b", "--devices", "orin-nano-8gb:5"])
    for words in (["plan", "--modle", "x"], ["plan", "--context", "many"], ["plans"], ["models", "fetch"]):
        assert refusal(words), words
