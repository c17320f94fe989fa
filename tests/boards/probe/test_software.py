"""Rules for a board's torch, and the check that a torch has to pass."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from flowspec_edge.boards.probe.facts import TorchFacts, protections, system_facts, torch_check_program
from flowspec_edge.boards.probe.onboard import system, torch_check
from flowspec_edge.boards.probe.software import install, judge_torch, required, unfit
from flowspec_edge.util import jetson

ROOT = Path(__file__).resolve().parents[3]
JP6 = ("sudo pip3 install --index-url https://pypi.jetson-ai-lab.io/jp6/cu126/+simple/ 'torch==2.8.0' "
       "'numpy==1.26.4'")
GOOD = {"version": "2.8.0", "file": "/usr/local/lib/torch/__init__.py", "build": "b", "numpy": "1.26.4",
        "cuda": [8, 7], "built_for": "12.6", "gpu": "Orin", "why": "", "numpy_fault": "", "gpu_fault": "",
        "unit": "user nobody, groups video, render", "outside": None, "own": {}}


def told(**changes: Any) -> TorchFacts:
    return system_facts({"torch": {**GOOD, **changes}}).torch


@pytest.mark.parametrize("version", [
    "2.5.1", "2.6.0", "2.6.0+cu126", "2.7.0a0+79aa17489c.nv25.04", "2.6.0a0+ecf3bae40a.nv25.01", "2.6.0rc1",
    "2.10.0", "2.13.1+cpu", "2.14.0", "2.14.0.dev20260801", "3.0"])
def test_a_version_passes_here_if_transformers_and_pip_take_it(version: str) -> None:
    """transformers' own rule for the lower end (import_utils.is_torch_available), pyproject's for both."""
    by_transformers = Version(version) >= Version("2.6.0")
    below = Version(version).release < (2, 14)
    assert (unfit(version) == "") == (by_transformers and below)


def test_a_pre_release_of_the_oldest_version_fails() -> None:
    said = unfit("2.6.0a0+ecf3bae40a.nv25.01")
    assert said.endswith("need torch<2.14,>=2.6, and a pre-release of 2.6.0 counts as older")
    assert "pre-release" not in unfit("2.5.1")
    assert "no version" in unfit("N/A")


def test_transformers_has_the_same_lower_bound(tmp_path: Path) -> None:
    """The library itself, before a torch that has no more than this name and version."""
    for version, used in (("2.6.0a0+ecf3bae40a.nv25.01", False), ("2.7.0a0+79aa17489c.nv25.04", True)):
        site = tmp_path / version
        (site / "torch").mkdir(parents=True)
        (site / "torch/__init__.py").touch()
        (info := site / f"torch-{version}.dist-info").mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        ask = ("from transformers.utils.import_utils import is_torch_available; "
               "print(bool(is_torch_available()))")
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True,
                              env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"})
        assert done.stdout.strip() == str(used)
        assert (unfit(version) == "") == used


def test_the_requirement_is_pyprojects() -> None:
    (line,) = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"torch>=' in line]
    assert required() == Requirement(line.split('"')[1])


def test_advice_goes_by_the_jetpack() -> None:
    assert install("36.4.3", "python3") == install("36.5.0", "python3") == JP6
    assert install("36.4.3", "/opt/python").startswith("sudo /opt/python -m pip install --index-url ")
    assert install("38.2.0", "python3").startswith("sudo pip3 install --break-system-packages --index-url "
                                                   "https://pypi.jetson-ai-lab.io/sbsa/cu130/+simple/ ")
    assert install("", "python3") == "sudo pip3 install 'torch<2.14,>=2.6' numpy"
    assert "made for L4T 99.1.0" in install("99.1.0", "python3")


def test_every_jetpack_that_is_supported_has_a_torch_that_fits() -> None:
    for known in jetson.jetpacks():
        assert known.source
        assert bool(known.install()) == known.supported
        assert bool(known.reason and known.advice) == (not known.supported)
        if known.supported:
            wanted = Requirement(known.torch).specifier
            assert any(f"2.{minor}.0" in wanted and not unfit(f"2.{minor}.0") for minor in range(14))


def test_libraries_that_a_jetson_may_lack() -> None:
    def name(l4t: str, file: str) -> str:
        known = jetson.shared_library_of(l4t, file)
        return known.name if known else ""

    assert [name("36.4.3", f"lib{file}") for file in (
        "cudss.so.0", "cusparseLt.so.0", "cusparse.so.12", "cudnn.so.9", "openblas.so.0", "z.so.1")] == [
        "libcudss.so", "libcusparseLt.so", "libcu", "libcu", "libopenblas.so", ""]
    assert [name("38.2.0", file) for file in ("libcudss.so.0", "libopenblas.so.0")] == ["", "libopenblas.so"]
    assert all("\n" not in known.install and known.source for known in jetson.system().shared_library)


@pytest.mark.parametrize(("facts", "check", "found", "advice"), [
    ({}, "", "", ""),
    ({"version": "2.5.0"}, "torch", "2.5.0; flowspec and transformers need", JP6),
    ({"numpy_fault": "RuntimeError: Numpy is not available", "numpy": "2.2.6"}, "numpy",
     "torch 2.8.0 cannot use numpy 2.2.6: RuntimeError: Numpy is not available", JP6),
    ({"version": "", "why": "ModuleNotFoundError: No module named 'torch'",
      "own": {"torch": "/home/me/.local/lib/python3.10/site-packages/torch/__init__.py"}}, "torch",
     "only in /home/me/.local/lib/python3.10/site-packages, which services do not see",
     "for all users: " + JP6),
    ({"version": "", "why": "ModuleNotFoundError: No module named 'numpy'",
      "own": {"numpy": "/home/me/.local/lib/python3.10/site-packages/numpy/__init__.py"}}, "numpy",
     "only in /home/me/.local", JP6),
    ({"version": "", "why": "OSError: libcudart.so.12: cannot open shared object file"}, "torch",
     "python3 cannot import torch and numpy: OSError: libcudart.so.12: cannot open",
     "apt-get install -y nvidia-jetpack"),
    ({"version": "", "why": "ImportError: libcudss.so.0: cannot open shared object file: No such file or "
      "directory"}, "torch", "libcudss.so.0", "apt-get install -y cudss"),
    ({"version": "", "why": "ImportError: libother.so.1: cannot open shared object file"}, "torch",
     "libother.so.1", "install what is missing, or torch again: " + JP6),
    ({"version": "", "why": "MemoryError: the kernel ended it"}, "torch",
     "there is not enough memory to import it (MemoryError: the kernel ended it)", "flowspec deploy stop"),
    ({"cuda": None, "built_for": None}, "torch", "2.8.0, built without CUDA, sees no CUDA GPU", JP6),
    ({"cuda": None}, "torch", "2.8.0, built for CUDA 12.6, sees no CUDA GPU", JP6),
    ({"gpu_fault": "RuntimeError: CUDA error: no kernel image is available"}, "gpu",
     "2.8.0: a product on Orin (compute capability 8.7) fails: RuntimeError: CUDA error: no kernel", JP6),
    ({"cuda": None, "outside": GOOD}, "torch", "2.8.0 works as root, but not with the service's protections "
     "(user nobody, groups video, render): it sees no GPU", "ls -l /dev/nvhost*"),
    ({"version": "", "why": "PermissionError: x", "outside": {**GOOD, "numpy_fault": "f"}}, "numpy",
     "torch 2.8.0 cannot use numpy 1.26.4: f", JP6)])
def test_each_fault_has_its_own_message(facts: dict[str, Any], check: str, found: str, advice: str) -> None:
    faults = [*judge_torch(told(**facts), "python3", "36.4.3", "cuda")]
    assert [fault.check for fault in faults] == ([check] if check else [])
    assert all(found in fault.found and advice in fault.advice and fault.state == "failed"
               for fault in faults)


def test_a_product_that_fails_beside_our_own_service_is_noted() -> None:
    facts = {"gpu_fault": "OutOfMemoryError: CUDA out of memory"}
    (fault,) = judge_torch(told(**facts), "python3", "36.4.3", "cuda", busy=True)
    assert (fault.check, fault.state == "warning", "deploy stop" in fault.advice) == ("gpu", True, True)


def trial(program: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                          env={"PATH": "/usr/bin:/bin", **environment})
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def test_the_torch_of_this_machine_passes() -> None:
    import numpy

    facts = trial(torch_check_program("cpu")["program"])
    assert (facts["version"], facts["file"], facts["numpy"]) == (torch.__version__, torch.__file__,
                                                                 numpy.__version__)
    assert (facts["why"], facts["numpy_fault"], facts["gpu_fault"]) == ("", "", "")
    assert facts["built_for"] == torch.version.cuda
    assert facts["cuda"] == ([*torch.cuda.get_device_capability()] if torch.cuda.is_available() else None)
    assert facts["build"] == torch_check.build()


@pytest.mark.slow
def test_without_memory_the_check_is_killed_first() -> None:
    program = f"{torch_check_program('cpu')['program']}\nprint(open('/proc/self/oom_score_adj').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2].strip() == "1000"
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert system.run_torch_check([sys.executable, "-c", killed])["why"].startswith("MemoryError: ")


def test_the_product_is_compared() -> None:
    assert torch_check.product("cpu") == ""
    assert torch_check.product("meta").startswith("NotImplementedError: ")


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that copies one element wrongly."""
    real = torch.Tensor.to

    def wrong(tensor: torch.Tensor, device: str) -> torch.Tensor:
        copy = real(tensor, device).clone()
        copy[3, 5] += 9
        return copy

    monkeypatch.setattr(torch.Tensor, "to", wrong)
    assert torch_check.product("cpu").startswith("it is off by ")


@pytest.mark.parametrize("fault", [RuntimeError("Numpy is not available"), None])
def test_a_round_trip_through_numpy(fault: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_numpy(array: Any) -> torch.Tensor:
        if fault:
            raise fault
        return torch.zeros(6)

    assert torch_check.round_trip() == ""
    monkeypatch.setattr(torch, "from_numpy", from_numpy)
    assert torch_check.round_trip() == ("RuntimeError: Numpy is not available" if fault else
                                        "0 to 5 came back as [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]")


def test_a_rebuilt_torch_has_another_digest(tmp_path: Path) -> None:
    """Torches of one version: of the same build, of another commit, for another CUDA, with other files."""
    builds = []
    for commit, cuda, record in ((1, 12, "a"), (1, 12, "a"), (2, 12, "a"), (1, 13, "a"), (1, 12, "b")):
        site = tmp_path / str(len(builds))
        (site / "torch").mkdir(parents=True)
        (site / "torch/__init__.py").write_text(
            f"class version:\n    git_version, cuda = '{commit}', '{cuda}'\n")
        (info := site / "torch-2.8.0.dist-info").mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0\n")
        (info / "RECORD").write_text(f"torch/lib/libtorch.so,sha256={record},1\n")
        done = subprocess.run([sys.executable, "-c", f"{inspect.getsource(torch_check)}\nprint(build())"],
                              env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}, capture_output=True,
                              text=True, check=True)
        builds.append(done.stdout)
    assert builds[0] == builds[1]
    assert len({*builds}) == 4


def _chained() -> None:
    try:
        raise OSError("libcudart.so.12: cannot open shared object file")
    except OSError as error:
        raise RuntimeError("Failed to import transformers.models") from error


def _during() -> None:
    try:
        raise ImportError("libopenblas.so.0: cannot open shared object file\nmore of it")
    except ImportError:
        raise ImportError("\n\nIMPORTANT: PLEASE READ THIS")  # noqa: B904, which numpy does not heed either


def _hidden() -> None:
    try:
        raise KeyError("looked up")
    except KeyError:
        raise ImportError("the cause") from None


@pytest.mark.parametrize(("fails", "said"), [
    (_chained, "OSError: libcudart.so.12: cannot open shared object file"),
    (_during, "ImportError: libopenblas.so.0: cannot open shared object file"),
    (_hidden, "ImportError: the cause")])
def test_the_innermost_cause_is_shown(fails: Callable[[], None], said: str) -> None:
    with pytest.raises((ImportError, RuntimeError)) as raised:
        fails()
    assert torch_check.innermost(raised.value) == said


CHECK = ROOT / "flowspec_edge/boards/deploy/steps/environment_check.py"


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "said"), [
    ({"torch.py": "raise OSError('libcudart.so.12: cannot open shared object file')"},
     "the board's Python has no torch that every user can import: OSError: libcudart.so.12: cannot open"),
    ({"zmq.py": "try:\n    raise OSError('libsodium.so.23: cannot open')\nexcept OSError as e:\n"
                "    raise RuntimeError('no backend') from e"},
     "zmq cannot be imported: OSError: libsodium.so.23: cannot open"),
    ({"sitecustomize.py": "import torch\ndef fails(array):\n"
                          "    raise RuntimeError('Numpy is not available')\ntorch.from_numpy = fails"},
     f"torch {torch.__version__} cannot use the environment's numpy ")])
def test_a_new_environment_is_checked(broken: dict[str, str], said: str, tmp_path: Path) -> None:
    """On this machine, where torch lies in the environment itself: the check's prefix is changed."""
    for name, text in broken.items():
        (tmp_path / name).write_text(text)
    text = "import sys; sys.prefix = '/opt/flowspec/venvs/x'\n" + CHECK.read_text()
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False,
                          env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"})
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(said), done.stderr


def test_a_units_protections_are_those_that_a_stage_has() -> None:
    found = protections()
    assert {"NoNewPrivileges=yes", "ProtectSystem=strict", "ProtectHome=yes", "PrivateTmp=yes",
            "CapabilityBoundingSet=", "RestrictNamespaces=yes", "SystemCallArchitectures=native"} <= {*found}
    assert not [line for line in found if line.startswith(("Exec", "User", "Type", "Watchdog", "Load",
                                                           "Cache", "Restart", "Timeout", "Environment"))]
