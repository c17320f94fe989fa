"""A document's commands are found, and its outputs are compared and renewed."""

from __future__ import annotations

from kits import documents

TEXT = """Text.
<!-- run on each board -->
```sh
echo one
```
More.
<!-- do power off orin-2 -->
<!-- run on the PC -->
```sh
flowspec deploy up
```

```text
deployed in … s
```
"""


def test_steps_have_their_place_their_commands_and_their_output() -> None:
    assert [(step.what, step.script, step.output) for step in documents.steps(TEXT)] == [
        ("each board", "echo one\n", None), ("power off orin-2", "", None),
        ("the PC", "flowspec deploy up\n", "deployed in … s\n")]


def test_outputs_match_but_for_what_may_differ() -> None:
    assert documents.difference("a … c\nd\n", "a b c\nd\n") == ""
    assert documents.difference("a\n…\nd\n", "a\nb\nc\nd\n") == ""
    assert documents.difference("a\n…\nd\n", "a\nd\n") == ""
    assert documents.difference("a\nb\nd\n", "a\nc\nd\n") == "b"
    assert documents.difference("a (b)\n", "a (b)\nmore\n") == "the end"
    assert documents.difference("a.c\n", "abc\n") == "a.c"
    assert documents.difference("a\nb\n", "a\n") == "b"


def test_outputs_are_renewed_in_their_places() -> None:
    outputs = [None, None, documents.masked("deployed in 84 s  \n\n", [(r"\d+ s", "… s")])]
    assert documents.renewed(TEXT.replace("deployed in … s", "old"), outputs) == TEXT
