"""Help and usage errors import none of the heavy libraries: they take seconds on a board."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import contextlib, io, json, sys
from flowspec_edge.cli.main import main
found = []
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = main(arguments)
    heavy = [name for name in ("torch", "transformers", "numpy", "zmq", "starlette", "pydantic")
             if name in sys.modules]
    found.append([arguments, code, said.getvalue(), heavy])
print(json.dumps(found))
"""
GROUPS = ("bench", "sweep", "models", "device", "deploy", "keys")
HELP = [["--help"], *([group, "--help"] for group in GROUPS),
        ["generate", "--help"], ["serve", "--help"], ["bench", "run", "--help"],
        ["models", "shard", "--help"], ["generate", "--help-all"]]
ERRORS = [  # and a part of the line
    (["fly"], "no command 'fly'"),
    (["genrate", "x"], "did you mean generate"),
    (["bench", "rn"], "did you mean run"),
    (["deploy", "pan"], "did you mean plan"),
    (["models", "shrd", "--stages", "2"], "did you mean shard"),
    (["keys", "nothing"], "keys --help lists them"),
    (["generate", "x", "--strategy", "flowspec_pluss"], "did you mean flowspec_plus"),
    (["generate", "x", "--profile", "papr-7b"], "did you mean paper-7b"),
    (["generate", "x", "--model", "demoo"], "did you mean demo"),
    (["generate", "x", "--stages", "0"], "0 is not at least 1"),
    (["generate", "x", "--tau", "0"], "tau must be positive"),
    (["generate", "--prompt-file", "nowhere.txt"], "nowhere.txt"),
    (["generate", "x", "--chat"], "has no chat template"),
    (["chat", "--chat-template", "nowhere.jinja"], "no chat template 'nowhere.jinja'"),
    (["serve", "--strategy", "magic"], "no strategy 'magic'"),
    (["serve", "--emulate", "magic"], "no profile 'magic'"),
    (["bench", "run", "--strategies", "chunk_pp,magic"], "no strategy 'magic'"),
    (["bench", "run", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    (["sweep", "bandwidth", "--mbps", "0"], "--mbps must be positive numbers"),
    (["plan", "--devices", "orin-nano"], "no profile 'orin-nano'"),
    (["generate", "x", "--taau", "1"], "--tau"),
]


def test_help_and_usage_errors_import_nothing_heavy() -> None:
    cases = [*HELP, *(arguments for arguments, _ in ERRORS)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(cases)], capture_output=True, text=True,
                          check=True)
    found = json.loads(done.stdout)
    assert [(code, heavy) for _, code, _, heavy in found[:len(HELP)]] == [(0, [])] * len(HELP)
    for arguments, _, _, heavy in found[len(HELP):]:
        # pydantic checks profiles, plan computes with numpy, and strategies, which need it, know their
        # parameters: whether --taau is one, and sweep's default of pipedec_width.
        with_numpy = arguments[0] in ("plan", "sweep") or "--taau" in arguments
        assert set(heavy) <= {"pydantic", *(["numpy"] if with_numpy else [])}, arguments
    for (arguments, says), (_, code, said, _) in zip(ERRORS, found[len(HELP):], strict=True):
        assert (code, said.count("\n")) == (2, 1), (arguments, said)
        assert says in said, (arguments, said)
