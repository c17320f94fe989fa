"""Help and usage errors import none of the heavy libraries: they take seconds on a board."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
GROUPS = ("bench", "models", "device", "deploy", "keys")
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
    (["generate", "--prompt-file", "nowhere.txt"], "nowhere.txt"),
    (["generate", "x", "--chat"], "has no chat template, and its name matches no built-in one: take a model that has "
                                  "one, such as --model smollm2-135m"),
    (["chat", "--cluster", "cluster.toml"], "flowspec generate --cluster FILE --chat"),
    (["chat", "--chat-template", "nowhere.jinja"], "no chat template 'nowhere.jinja'"),
    (["serve", "--strategy", "magic"], "no strategy 'magic'"),
    (["serve", "--emulate", "magic"], "no profile 'magic'"),
    (["bench", "run", "--strategies", "chunk_pp,magic"], "no strategy 'magic'"),
    (["bench", "run", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    (["models", "shard", "--model", "demoo", "--stages", "2", "--out", "nowhere"], "did you mean demo"),
    (["models", "shard", "--model", "demo", "--draft", "nowhere", "--stages", "2", "--out", "x"], "nowhere"),
    (["models", "head", "demoo"], "did you mean demo"),
    (["models", "fetch", "qwen3-32"], "did you mean qwen3-32b"),
    (["deploy", "init", "orin-0", "orin-1", "--model", "qwen3-32"], "did you mean qwen3-32b"),
    (["models", "train-head", "--model", "demo", "--kind", "eagle2", "--data", "nowhere.txt"],
     "no training text at nowhere.txt"),
    (["models", "loss", "nowhere", "--against", "demoo"], "did you mean demo"),
    (["doctor", "--gpu", "--report", "/nowhere/report.json"], "/nowhere"),
    *((command, "flowspec deploy init HOST HOST… --out nowhere.toml") for command in (
        [*words.split(), "--cluster", "nowhere.toml"] for words in (
            "deploy plan", "deploy up", "deploy rollback", "deploy down", "deploy status", "deploy logs",
            "deploy restart", "deploy set model=demo", "keys show", "keys rotate", "doctor", "serve"))),
    (["bench", "run", "--profile", "nosuch.toml"], "flowspec device profile --out nosuch.toml"),
    (["models", "loss", "x", "--against", "demo", "--device", "gpu"], "'gpu' is not auto"),
    (["sweep", "bandwidth=0"], "bandwidth must be positive numbers"),
    (["plan", "--devices", "orin-nano"], "no profile 'orin-nano'"),
    (["plan", "--devices", "nosuch.toml"], "flowspec deploy init HOST HOST… --out nosuch.toml"),
    (["plan", "--devices", "nosuch.toml:3"], "flowspec device profile --out nosuch.toml"),
    (["generate", "x", "--set", "tau=0"], "tau must be positive"),
    (["generate", "x", "--set", "taau=1"], "did you mean tau?"),
    (["plan", "--model", "demoo", "--devices", "orin-nano-8gb:2"], "did you mean demo"),
    (["sweep", "bandwidth", "--cluster", "nowhere.toml"], "there is no cluster file nowhere.toml"),
]
# What a cluster file names, found before anything is imported or asked.
IN_FILES = [('model = "demoo"', "demoo"), ('model = "demo"\ndraft = "nowhere"', "nowhere"),
            ('model = "demo"\nstrategy = "magic"', "no strategy 'magic'")]


def test_a_wrong_name_in_a_cluster_file_imports_no_torch(tmp_path: Path) -> None:
    cases = []
    for number, (settings, _) in enumerate(IN_FILES):
        file = tmp_path / f"{number}.toml"
        file.write_text(f'[cluster]\nname = "lab"\n{settings}\n' + "".join(
            f'[[device]]\nname = "orin-{place}"\naddress = "192.0.2.{place}"\n' for place in (1, 2)))
        cases += [["deploy", "up", "--cluster", str(file)], ["keys", "rotate", "--cluster", str(file)]]
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(cases)], capture_output=True, text=True,
                          check=True)
    for place, (_, code, said, heavy) in enumerate(json.loads(done.stdout)):
        assert (code, said.count("\n")) == (2, 1), said
        assert IN_FILES[place // 2][1] in said
        assert "torch" not in heavy


def test_help_and_usage_errors_import_nothing_heavy() -> None:
    cases = [*HELP, *(arguments for arguments, _ in ERRORS)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(cases)], capture_output=True, text=True,
                          check=True)
    found = json.loads(done.stdout)
    assert [(code, heavy) for _, code, _, heavy in found[:len(HELP)]] == [(0, [])] * len(HELP)
    for arguments, _, _, heavy in found[len(HELP):]:
        # pydantic checks profiles, plan computes with numpy, and strategies, which need it, know their
        # parameters: what --set names, and sweep's default of pipedec_width.
        with_numpy = arguments[0] in ("plan", "sweep") or "--set" in arguments
        assert set(heavy) <= {"pydantic", *(["numpy"] if with_numpy else [])}, arguments
    for (arguments, says), (_, code, said, _) in zip(ERRORS, found[len(HELP):], strict=True):
        assert (code, said.count("\n")) == (2, 1), (arguments, said)
        assert says in said, (arguments, said)
