"""What the user or a file names cannot act on the terminal."""

from __future__ import annotations

import pytest

from flowspec_edge.cli.main import main


@pytest.mark.parametrize("arguments", [
    ["models", "inspect", "a\x1b]0;title\x07"], ["generate", "x", "--model", "\x9b2Jm\u202e"],
    ["\x1b[31mno-such-command"], ["doctor", "--cluster", "c\x1b[2J.toml"]])
def test_an_error_shows_control_characters_as_text(arguments: list[str], capfd: pytest.CaptureFixture[str]
                                                   ) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.rstrip("\n").isprintable()
    assert r"\x" in err
