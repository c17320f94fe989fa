from __future__ import annotations

import pytest

from flowspec_edge.util.terminal import no_control_characters, printable


@pytest.mark.parametrize(("text", "safe"), [
    ("plain – ü 漢字", "plain – ü 漢字"), ("two\n\tlines", "two\n\tlines"),
    ("\x1b]0;title\x07", r"\x1b]0;title\x07"), ("a\rb\x7f\x9b", r"a\x0db\x7f\x9b"),
    ("abc\u202etxt.exe", r"abc\u202etxt.exe"), ("\ud800", r"\ud800"), ("\U000e0041", r"\U000e0041"),
    ("icon \uf007", r"icon \uf007"), ("a\u2028b", r"a\u2028b"), ("three\u3000wide", "three\u3000wide"),
])
def test_what_a_terminal_would_act_on_is_escaped(text: str, safe: str) -> None:
    assert printable(text) == safe
    if safe == text:
        assert no_control_characters(text) == text
    else:
        with pytest.raises(ValueError, match="a terminal acts on"):
            no_control_characters(text)
