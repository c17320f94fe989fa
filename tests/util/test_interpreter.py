"""No interpreter that the product starts imports from the current directory, whatever lies there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kits.tiny_model_dir import tiny_model_dir

from flowspec_edge.util.interpreter import code_command, module_command

ROOT = Path(__file__).resolve().parents[2]
# Of the standard library, what interpreters import first and late; of libraries, what processes import.
HOSTILE = ("random", "json", "typing", "types", "enum", "signal", "collections", "contextlib", "selectors",
           "socket", "pickle", "runpy", "multiprocessing", "re", "sitecustomize", "usercustomize", "jinja2",
           "torch", "numpy", "zmq", "transformers", "safetensors", "llguidance", "joblib", "msgpack", "pip",
           "venv")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory like a downloaded model's whose modules leave a trace and fail."""
    directory = tmp_path / "hostile"
    directory.mkdir()
    trace = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + ' ')\nraise ImportError(__name__)\n"
    for name in HOSTILE:
        (directory / f"{name}.py").write_text(trace)
    (directory / "flowspec_edge").mkdir()
    (directory / "flowspec_edge" / "__init__.py").write_text(trace)
    return directory


@pytest.fixture
def environment() -> dict[str, str]:
    """Without what only Python 3.11 and newer obey."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


def ran(directory: Path) -> str:
    trace = directory.parent / "ran"
    return trace.read_text() if trace.exists() else ""


def test_commands_import_from_elsewhere(hostile: Path, environment: dict[str, str]) -> None:
    program = "import random, json, typing; print(json.dumps([random.__file__, __name__]))"
    for command in (code_command(program), code_command(program, python=sys.executable),
                    module_command("flowspec_edge", "--version"), module_command("json.tool", "--help"),
                    module_command("json.tool", "--help", python=sys.executable)):
        done = subprocess.run(command, cwd=hostile, env=environment, capture_output=True, check=True)
        assert done.stdout
    assert ran(hostile) == ""


def test_a_text_is_what_a_file_could_hold(environment: dict[str, str]) -> None:
    """Its first statement may be an import from __future__, as in the programs that boards are sent."""
    text = '"""What it does."""\nfrom __future__ import annotations\nimport sys\nprint(sys.argv, __doc__)\n'
    for python in (None, sys.executable):
        done = subprocess.run(code_command(text, "a b", "-c", python=python), env=environment,
                              capture_output=True, text=True, check=True)
        assert done.stdout == "['-c', 'a b', '-c'] What it does.\n"


def test_arguments_and_name_are_those_of_m(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "shown.py").write_text("import sys; print(sys.argv[1:], __name__, sys.path.count(''))\n")
    environment["PYTHONPATH"] = str(tmp_path)
    for python in (None, sys.executable):
        done = subprocess.run(module_command("shown", "a b", "-c", python=python), env=environment,
                              capture_output=True, text=True, check=True)
        assert done.stdout == "['a b', '-c'] __main__ 0\n"


@pytest.mark.parametrize("named", [":/nowhere", "/nowhere:"])
def test_an_empty_entry_of_pythonpath_is_not_the_current_directory(tmp_path: Path, named: str) -> None:
    (tmp_path / "plugin_of_this_directory.py").write_text("")
    program = ("import sys\nfrom flowspec_edge.util.interpreter import leave_out_current_directory\n"
               "import os\nleave_out_current_directory()\n"
               "print(os.environ['PYTHONPATH'])\nimport plugin_of_this_directory\n")
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(program)
    kept = f"{named}:{ROOT}" if named.startswith(":") else f"{ROOT}:{named}"
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONPATH": kept})
    assert "No module named 'plugin_of_this_directory'" in done.stderr
    assert "" not in done.stdout.strip().split(":")
    named_here = subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=False,
                                env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert named_here.returncode == 0  # the user's own choice stays


PROCESSES = """
import sys
from pathlib import Path
from flowspec_edge.boards.measurement.link import measure_hop
from flowspec_edge.model.untrusted.processes import TemplateRenderer
from flowspec_edge.drivers.processes.forkserver import preload
from flowspec_edge.drivers.processes.process_cluster import ProcessCluster
from flowspec_edge.drivers.processes.spec import ClusterSpec
from flowspec_edge.d0.request import Request

if __name__ == "__main__":
    preload()
    renderer = TemplateRenderer()
    assert renderer.render("{{ messages[0].content }}", {}, [{"content": "a"}]) == "a"
    renderer.close()
    with ProcessCluster(ClusterSpec(Path(sys.argv[1]), 1)).start() as cluster:
        assert len(cluster.generate(Request([1, 2, 3], max_new_tokens=3)).tokens) == 3
    assert measure_hop(8, "fp32", exchanges=20).mbps > 0
    print("done")
"""


@pytest.mark.slow
def test_the_processes_of_a_program_import_from_elsewhere(hostile: Path, tmp_path: Path,
                                                          environment: dict[str, str]) -> None:
    """The fork server, its resource tracker, a worker, the process for templates, a spawned one."""
    script = tmp_path / "script" / "program.py"
    script.parent.mkdir()
    script.write_text(PROCESSES)
    model = tiny_model_dir(tmp_path / "model")
    done = subprocess.run([sys.executable, str(script), str(model)], cwd=hostile, env=environment,
                          capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    assert ran(hostile) == ""


@pytest.mark.slow
def test_commands_run_in_a_models_directory(hostile: Path, environment: dict[str, str]) -> None:
    """And joblib's processes."""
    tiny_model_dir(hostile)
    script = Path(sys.executable).with_name("flowspec")
    command = [str(script), "bench", "run", "--strategies", "chunk_pp", "--limit", "1", "--max-new-tokens", "3",
               "--stages", "2", "--jobs", "2", "--model", "."]
    done = subprocess.run(command, cwd=hostile, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ran(hostile) == ""
