"""What a command refuses: one line says why, which cannot act on the terminal; the exit code is 2, and nothing is
written."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from kits.bench_reports import report
from kits.error_lines import error_line
from kits.planned_boards import profile
from kits.sharded_models import cut

from flowspec_edge.boards.planning.model_size import model_bytes
from flowspec_edge.cli.common.workload import shipped_recording
from flowspec_edge.cli.main import main
from flowspec_edge.device_profile import render

# Files in the directory that the commands run in; the fixture makes those that are no texts.
TEXTS = {
    "p.jsonl": '{"prompt": "import os\\n"}\n{"prompt": "def f(x):"}\n',
    "long.txt": "x" * 2100, "foreign.json": '{"precious": 1}', "here.toml": "mine",
    "files/model-q4.gguf": "", "open.json": "[", "any.json": "{}", "null.json": '{"fastest": null}',
    "fp8.json": '{"fastest": "fp8"}',
    "cluster.toml": '[cluster]\nname = "here"\nserve_port = 1\n'
                    '[[device]]\nname = "d0"\naddress = "127.0.0.1"\nrole = "draft"\n'
                    '[[device]]\nname = "v1"\naddress = "192.0.2.1"\nrole = "verify"\n'}
GENERATE = "generate --model model --clock virtual --stages 2 --max-new-tokens 12"
MEASURED = "bench run --model model --prompts p.jsonl --stages 1 --max-new-tokens 3 --strategies autoregressive"
# A command, and what follows it with a part of the line; … stands between two parts.
REFUSALS = {
    "plan --model model": {
        "": "give --devices",
        "--devices no-such-board": "no profile 'no-such-board'",
        "--devices orin-nano-8gb:2 --context 99999": "--context 99999 is more than the 2048 tokens",
        "--devices orin-nano-8gb:2 --strategies megatron": "megatron exists in virtual time only",
        "--devices full.toml": "full alone lacks",
        "--devices full.toml:3 --dtype fp16": "in fp16 with 2048 tokens of context needs"},
    "models inspect": {"a\x1b]0;title\x07": r"\x1b", "demo": "is not a sharded model"},
    "generate x --model": {"\x9b2Jm\u202e": r"\x9b"},
    "\x1b[31mno-such-command": {"": r"\x1b"},
    "doctor --cluster": {"c\x1b[2J.toml": r"\x1b"},
    "plan --devices orin-nano-8gb:5 --model": {"lama-2-7b": "did you mean llama-2-7b"},
    **{command: {given: f"GGUF … {given}" for given in ("files", "files/model-q4.gguf", "files/nothing.gguf")}
       for command in ("plan --devices orin-nano-8gb:2 --model", "generate 'x y' --model", "models head",
                       "models shard --stages 2 --out out --model")},
    "device kernels": {
        "--rows '1;4'": "--rows must be whole numbers from 1, separated by commas, not '1;4'",
        "--shape 4096": "--shape '4096': give outputs and inputs, such as 4096x4096",
        "--shape 'a x b'": "--shape must be whole numbers from 1, separated by an x",
        "--shape 100x64": "a matrix of a multiple of 16 outputs by one of 64 inputs",
        "--out absent/kernels.json": "no directory absent",
        "--dtype int8": "'int8' is not one of"},
    "device profile": {
        "--out here.toml": "here.toml exists already; give another name, or replace it with --force",
        "--out here.txt": "a profile's file ends in .toml",
        "--out absent/here.toml": "no directory absent",
        "--peer nowhere": "--peer 'nowhere': give HOST:PORT",
        "--peer host:0": "give HOST:PORT",
        "--model absent": "no model 'absent'"},
    "doctor": {
        "--gpu --fix": "on each board",
        "--device cpu": "--device works with --gpu only",
        "--device cuda": "--device works with --gpu only",
        "--report board.json": "--report works with --gpu only"},
    "deploy init": {
        "a --out new.toml": "needs two boards at least",
        "a b@ --out new.toml": "'b@' is not [USER@]HOST",
        "a b --key /no/key --out new.toml": "no file /no/key",
        "a b --out no/new.toml": "make it first"},
    "models shard --model model --out out": {
        "": "give either --stages N or --split",
        "--stages 9": "9 stages are more than the model's 2 layers",
        "--split 2,3": "makes 5 layers, and the model has 2",
        "--split 2,x": "--split must be whole numbers from 1, separated by commas",
        "--stages 2 --split 1,1": "give either --stages N or --split",
        "--stages 2 --group 64": "--group goes with --dtype int4",
        "--stages 2 --kernels x.json": "--kernels goes with --dtype 4bit",
        "--stages 2 --draft nowhere": "no draft model at nowhere",
        "--stages 2 --dtype int3": "int3"},
    "models shard --model model --out out --stages 2 --dtype 4bit --kernels": {
        "null.json": "no 4-bit kind works on that device",
        "fp8.json": "'fp8' is the fastest, which is no 4-bit kind",
        "any.json": 'it has no key "fastest"',
        "open.json": "is not valid JSON",
        "none.json": "cannot read"},
    "models fetch": {
        "nothing": "flowspec models list",
        "qwen3-8b --head eagle2": "only AngelSlim/Qwen3-8B_eagle3 (eagle3)",
        "qwen3-8b --head RedHatAI/Qwen3-8B-speculator.peagle":
            "a head in the format P-EAGLE, which cannot be run … RedHatAI/Qwen3-8B-speculator.dflash2 (dflash)"},
    "models verify": {
        "model": "is not a sharded model: manifest.json is missing"},
    GENERATE: {
        "": "--prompt-file",
        "text --prompt-file also": "--prompt-file",
        "''": "prompt",
        "--prompt-file long.txt": "2048",
        "x --dtype fp8": "'--dtype'",
        "x --set plus_width=0": "plus_width",
        "x --set tree_size=7": "'tree_size'",
        "x --tau 1": "No such option … --tau",
        "x --pipedec-width 8": "No such option … --pipedec-width",
        "x --trace .": "cannot write .: ",
        "x --trace no/such.json": "cannot write no/such.json: ",
        "x --system y": "--system works with --chat only",
        "x --chat-template vicuna": "--chat-template works with --chat only",
        "x --chat-template-kwargs {}": "--chat-template-kwargs works with --chat only",
        "--chat": "give either a prompt or --prompt-file",
        "--chat x": "has no chat template, and its name matches no ",
        "--chat x --chat-template alpaca": "no chat template 'alpaca'",
        "--chat --prompt-file long.txt --chat-template vicuna": "the model stops at 2048; lower --max-new-tokens",
        "x --chat --chat-template vicuna --chat-template-kwargs {": "not valid JSON",
        "x --chat --chat-template vicuna --chat-template-kwargs []": "must be a JSON object",
        """x --chat --chat-template vicuna --chat-template-kwargs '{"messages": []}'""": "messages cannot be set so"},
    "generate x --model qwen3-8b": {"": "flowspec models fetch qwen3-8b"},
    "generate x --model few": {
        "--strategy pipedec": "pipedec drafts with draft-lm/, which … draft with its EAGLE-2 head: --draft eagle2",
        "--strategy flowspec --draft lm": "flowspec drafts with draft-lm/, which",
        "--strategy spd --draft eagle2": "make it with: flowspec models train-spd --model "},
    "generate x --model cut --clock virtual": {
        "--stages 4": "was sharded into 2 stages, not 4: use 2, or shard it again",
        "--draft eagle3": "flowspec_plus drafts with eagle3/, which"},
    "generate x --model model --device": dict.fromkeys(
        ["gpu", "cuda:x", "cuda:", "cuda:١", "cuda:-1", "cpu:0", "mps", "''"], "is not auto, cpu, cuda or cuda:N"),
    "generate x --cluster cluster.toml": {
        "--device cpu": "--device",
        "--stages 2": "--stages does not work with --cluster",
        "--set segment=8": "--set does not work with --cluster",
        "--clock virtual": "--clock does not",
        "--trace t": "--trace does not",
        "--strategy magic": "no strategy 'magic'",
        "--system s": "--system works with --chat only"},
    "chat --model model --stages 2": {"": "no chat template"},
    "serve --port 0 --model model --stages 2": {
        "--host 0.0.0.0": "others can reach 0.0.0.0: set FLOWSPEC_API_KEY (or --api-key)",
        "--model magic": "no model 'magic'",
        "--stages 3": "3 stages are more than the model's 2 layers",
        "--api-key ''": "the API key must not be empty",
        "--port 70000": "Invalid value for '--port'",
        "--context 0": "Invalid value for '--context'",
        "--scheduling-policy priority": "Invalid value for '--scheduling-policy'",
        "--cluster x.toml": "give --cluster or --stages, not both",
        "--board-model /model": "--board-model works with --cluster only",
        "--local": "No such option … --local",
        "--model without-tokenizer": "tokenizer.json or tokenizer.model is missing"},
    "serve --cluster cluster.toml": {"--device cpu": "--device"},
    "up": {"": "no command 'up'"},
    "bench run --model model --prompts p.jsonl": {
        "--strategies ,": "--strategies has no name",
        "--max-new-tokens 2047": "more are asked for, but the model stops at 2048; lower "
                                 "--max-new-tokens, or take the end of long prompts with --truncate N",
        "--temperatures 0,warm": "--temperatures must be numbers separated by commas, not '0,warm'",
        "--temperatures 0,101": "temperature must be 0 (greedy) or 0.001 to 100, not 101",
        "--temperatures 0,1 --temperature 1": "give --temperature or --temperatures, not both",
        "--clients 2 --arrival-rate 1": "give --clients or --arrival-rate, not both",
        "--by-category": "prompt 1 has no category; omit --by-category",
        "--chat": "has no chat template: leave --chat out",
        "--chat --truncate 9": "give --chat or --truncate, not both",
        "--resume": "--resume needs --json OUT",
        "--resume --json foreign.json": "is no report of flowspec bench run … or write to another place",
        "--model bare --strategies autoregressive,flowspec": "flowspec drafts with eagle2/, which"},
    f"{MEASURED} --resume --json measured.json": {
        "--seed 3": "was measured with other settings: seed differs (0 there, 3 here); use the same",
        "--profile orin-nano-8gb": "was measured with other settings: profile differs;",
        "--clock wall": "was measured with other settings: clock differs (virtual there, wall here)"},
    "bench run --recording": {
        "none.flowrec": "there is no recording none.flowrec",
        "demo.flowrec --chat": "leave --chat out",
        "demo.flowrec --clock wall": "leave --clock wall out",
        "demo.flowrec --temperature 0.5": "no text at temperature 0.5",
        "demo.flowrec --strategies pearl --set draft=lm": "leave pearl out"},
    "record": {
        "--out x.flowrec --draft ngram": "n-grams need no recording",
        "--out nowhere/x.flowrec": "no directory nowhere"},
    "bench plot": {
        "--out f.svg": "give --from OUT.json",
        "--from good.json": "give --out F.svg or F.png",
        "--from good.json --out f.jpeg": "f.jpeg: a figure must end in .svg or .png"},
    "bench timeline --model model --max-new-tokens 4 --stages 2 --prompt": {
        "''": "the prompt is empty",
        "x --out t.txt": "a figure must end in .svg or .png"},
    "bench tables": {
        "--from good.json --json x.json": "--from only reads files",
        "--temperature 1": "No such option"},
    "reproduce": {
        "flowspec-table-4": "did you mean flowspec-table-3?",
        "nothing": "nothing to reproduce is called 'nothing'; there are flowspec-table-1,",
        "spd-law --prompts /nowhere.jsonl --out made": "cannot read /nowhere.jsonl",
        "spd-law --out /proc/nowhere": "cannot make the directory /proc/nowhere/measured"},
    "sweep": {
        "bandwidth=fast": "bandwidth must be positive numbers separated by commas, not 'fast'",
        "bandwidth=inf": "bandwidth must be positive numbers",
        "bandwidth=125,250,125.0": "bandwidth names 125 twice",
        "stages=4,2.5": "stages must be whole numbers from 1, separated by commas",
        "depth=3,3": "depth names 3 twice",
        "depth expand_depth=-3": "expand_depth must be whole numbers from 1",
        "segment=16,9000": "a segment of 9001 rows is more than 8192",
        "bandwidth latency=1": "bandwidth is swept alone",
        "depth=2 depth=3": "the axis depth is given twice",
        "width=4 tau=1 depth=2": "a sweep has one axis or two, not 3: width, tau, depth",
        "tau": "tau needs its values: flowspec sweep tau=V,V (above 0, to 65536)",
        "widht=4": "no axis and no strategy's parameter 'widht'; did you mean width?",
        "stages=2 --stages 4": "stages is the axis of this sweep: leave --stages out",
        "tau=1,2 --set tau=3": "tau is the axis of this sweep: leave --set tau out",
        "latency --links namespaces": "--links namespaces is for the axis bandwidth, not latency",
        "latency --cluster c.toml": "boards cannot change their link latency",
        "bandwidth --cluster x.toml --links namespaces": "not both",
        "bandwidth --cluster x.toml --device cpu": "--device",
        "bandwidth --mbps 1000": "No such option … --mbps"},
}
CASES = {f"{command} {words}": says for command, refused in REFUSALS.items() for words, says in refused.items()}


@pytest.fixture(scope="module")
def place(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("place")
    for name in ("files", "made/measured"):
        (path / name).mkdir(parents=True)
    for name, text in TEXTS.items():
        (path / name).write_text(text)
    (path / "model").symlink_to(model)
    (path / "demo.flowrec").symlink_to(shipped_recording("demo") or "")
    for name, parts in {"bare": ["target"], "few": ["target", "eagle2"]}.items():
        (path / name).mkdir()
        for part in parts:
            (path / name / part).symlink_to(model / part)
    shutil.copytree(model, path / "without-tokenizer")
    (path / "without-tokenizer/target/tokenizer.json").unlink()
    cut(model / "target", path / "cut", 2)
    layer = model_bytes(str(model), "fp16").layer
    full = profile(name="full", layers=2, hidden_width=32, layer_mb=layer / 1e6, usable_mb=500.1)
    (path / "full.toml").write_text(render(full))
    report(["flowspec"], ["qa"], [0.0]).save(path / "good.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        assert main([*MEASURED.split(), "--json", "measured.json"]) == 0
    return path


def written(place: Path) -> dict[Path, int]:
    """When each file was written; 0 for a directory, where the check of a place may leave its time."""
    return {path: path.stat().st_mtime_ns if path.is_file() else 0 for path in place.rglob("*")}


@pytest.mark.parametrize("words", CASES)
def test_one_line_says_why(place: Path, words: str, monkeypatch: pytest.MonkeyPatch,
                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("FLOWSPEC_API_KEY", raising=False)
    before = written(place)
    line = error_line(capsys, main(shlex.split(words)))
    assert line.rstrip("\n").isprintable()
    assert [part for part in CASES[words].split(" … ") if part not in line] == [], line
    assert written(place) == before
