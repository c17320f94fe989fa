from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_llama

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


@pytest.mark.parametrize("shown", [True, False])
def test_libraries_show_no_bars_while_a_model_loads(tmp_path: Path, shown: bool) -> None:
    """In a process without the commands' environment; bars of others are shown as before."""
    tiny_llama(tmp_path, layers=1)
    program = ("import sys; from pathlib import Path; from transformers.utils import logging; "
               "from flowspec_edge.runtime.plain import PlainDecoder; from transformers import AutoModel; "
               "PlainDecoder(Path(sys.argv[1])); "
               f"{'AutoModel.from_pretrained(sys.argv[1])' if shown else ''}")
    environment = {key: value for key, value in os.environ.items() if key != "TQDM_DISABLE"}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True,
                          check=True, env=environment)
    assert ("%|" in done.stderr) == shown
