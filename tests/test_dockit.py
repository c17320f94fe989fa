"""A document's commands are found, and its outputs are compared and renewed."""

from __future__ import annotations

import dockit

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
    assert [(step.what, step.script, step.output) for step in dockit.steps(TEXT)] == [
        ("each board", "echo one\n", None), ("power off orin-2", "", None),
        ("the PC", "flowspec deploy up\n", "deployed in … s\n")]


def test_outputs_match_but_for_what_may_differ() -> None:
    assert dockit.difference("a … c\nd\n", "a b c\nd\n") == ""
    assert dockit.difference("a\n…\nd\n", "a\nb\nc\nd\n") == ""
    assert dockit.difference("a\n…\nd\n", "a\nd\n") == ""
    assert dockit.difference("a\nb\nd\n", "a\nc\nd\n") == "b"
    assert dockit.difference("a (b)\n", "a (b)\nmore\n") == "the end"
    assert dockit.difference("a.c\n", "abc\n") == "a.c"
    assert dockit.difference("a\nb\n", "a\n") == "b"


def test_outputs_are_renewed_in_their_places() -> None:
    outputs = [None, None, dockit.masked("deployed in 84 s  \n\n", [(r"\d+ s", "… s")])]
    assert dockit.renewed(TEXT.replace("deployed in … s", "old"), outputs) == TEXT
