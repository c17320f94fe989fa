"""The rules on a board's JetPack, Python and torch (``checks.CHECKS``), and what to install."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import PurePosixPath

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from flowspec_edge.boards.images.archive import NVIDIA, Image
from flowspec_edge.boards.probe.facts import SystemFacts, TorchFacts
from flowspec_edge.boards.probe.findings import Finding
from flowspec_edge.errors import UsageError
from flowspec_edge.util.jetson import ORIN, jetpack_of, shared_library_of

_PYTHON = (3, 10)
_NO_DOCKER = "there is no docker"  # as ``onboard.system.docker`` says it
_RUNTIME = ("sudo apt-get install -y nvidia-container-toolkit && sudo nvidia-ctk runtime configure --runtime=docker "
            "&& sudo systemctl restart docker")
_DEVICES = "/dev/nvhost* /dev/nvmap /dev/nvidia*"


@cache
def required() -> Requirement:
    """Read the torch that flowspec requires from the package's metadata.

    Raise UsageError if flowspec is not installed.
    """
    try:
        needs = map(Requirement, requires("flowspec-edge") or ())
        return next(need for need in needs if need.name == "torch")
    except PackageNotFoundError:
        raise UsageError("flowspec-edge is not installed: clone its repository, and make setup") from None


def unfit(version: str) -> str:
    """Return why flowspec cannot use a torch of this version; "" if it can.

    By PEP 440, as in transformers: 2.6.0+cu126 is 2.6.0, but 2.6.0a0+ecf3bae40a.nv25.01 is older than 2.6.0.
    """
    need = required()
    try:
        parsed = Version(version)
    except InvalidVersion:
        return f"{version!r} is no version that Python knows"
    if need.specifier.contains(parsed, prereleases=True):
        return ""
    early = parsed.is_prerelease and need.specifier.contains(Version(parsed.base_version))
    why = f", and a pre-release of {parsed.base_version} counts as older" if early else ""
    return f"{version}; flowspec and transformers need torch{need.specifier}{why}"


def install(l4t: str, python: str) -> str:
    """Return how to install a suitable torch for all users of ``python``; ``l4t``: "" if the board is no Jetson."""
    release = jetpack_of(l4t) if l4t else None
    if release and release.torch:
        return release.install(python)
    if l4t:
        return f"there install {required()} as made for L4T {l4t}, and numpy, for all users"
    pip = "pip3" if python == "python3" else f"{python} -m pip"
    return f"sudo {pip} install '{required()}' numpy"


def judge_jetpack(l4t: str) -> Finding | None:
    """Return the fault of a release of L4T; None if it is supported, or "" (no Jetson)."""
    release = jetpack_of(l4t)
    if release is None:
        return Finding("board", "warning", f"L4T {l4t} is a release that this flowspec does not know",
                     "go on if nothing else is in the way") if l4t else None
    if release.supported:
        return None
    return Finding("board", "failed", f"L4T {l4t} (JetPack {release.name}): {release.reason}", release.advice)


def judge_docker(system: SystemFacts, image: Image | None, torch_device: str) -> Iterator[Finding]:
    """Judge what runs an image, and whether it can run this one; None: any."""
    docker = system.docker
    if docker.why:
        yield Finding("docker", "failed", docker.why, f"sudo apt-get install -y docker.io && {_RUNTIME}"
                      if docker.why == _NO_DOCKER else "sudo systemctl enable --now docker")
    elif not docker.group:
        yield Finding("docker", "failed", "there is no group docker, whose members may use it",
                      "sudo groupadd --system docker && sudo systemctl restart docker.socket docker")
    elif torch_device.startswith("cuda") and NVIDIA not in docker.runtimes:
        yield Finding("docker", "failed", f"it has no runtime {NVIDIA}, but {', '.join(docker.runtimes)}",
                      _RUNTIME)
    elif image and image.machine != system.machine:
        yield Finding("docker", "failed", f"the image is for {image.machine}, and the board is {system.machine}",
                      "build it on a board like this one, or for its platform (docker build --platform)")
    else:
        yield Finding("docker", "ok", docker.version)


def python_fault(facts: SystemFacts, python: str) -> Finding | None:
    """Return the fault of the board's Python, None without one; ``python``: its name in the cluster file."""
    if facts.python >= _PYTHON:
        return None
    return Finding("python", "failed", f"{python} is {'.'.join(map(str, facts.python))}",
                   "name one that is 3.10 or newer, board_python in the cluster file")


def judge_torch(torch: TorchFacts, python: str, l4t: str, torch_device: str, dtype: str = "",
                busy: bool = False) -> Iterator[Finding]:
    """Judge torch, and report causes before their consequences.

    dtype   of the weights that a stage multiplies
    busy    whether a flowspec service holds memory on the board, so that the GPU check may run out of it
    """
    install_command, outside = install(l4t, python), torch.outside
    if _fault(torch, torch_device) and outside and not _fault(outside, torch_device):
        yield Finding(
            "torch", "failed", f"{outside.version} works as root, but not with the service's protections "
                     f"({torch.unit}): {_fault(torch, torch_device)}",
            f"let every user read {outside.file}, and those groups use the GPU: ls -l {_DEVICES}")
        return
    torch = replace(outside, own=torch.own) if outside else torch
    if torch.why:
        yield _not_imported(torch, python, l4t, install_command)
    elif why := unfit(torch.version):
        yield Finding("torch", "failed", why, install_command)
    elif torch.numpy_fault:
        yield Finding(
            "numpy", "failed",
            f"torch {torch.version} cannot use numpy {torch.numpy}: {torch.numpy_fault}",
            f"install a numpy that it was built against: {install_command}")
    else:
        yield from _gpu(torch, l4t, torch_device, dtype, install_command, busy)


def _fault(torch: TorchFacts, torch_device: str) -> str:
    if torch.why or torch.numpy_fault:
        return str(torch.why or torch.numpy_fault)
    if torch_device == "cpu":
        return ""
    return str(torch.gpu_fault or ("" if torch.cuda else "it sees no GPU"))


def _not_imported(torch: TorchFacts, python: str, l4t: str, install_command: str) -> Finding:
    missing = re.fullmatch(r"ModuleNotFoundError: No module named '(torch|numpy)'", torch.why)
    if missing and (user_file := torch.own.get(missing[1])):
        return Finding(missing[1], "failed",
                            f"only in {PurePosixPath(user_file).parent.parent}, which services do not see",
                            f"install it for all users: {install_command}")
    if missing:
        return Finding("torch", "failed",
                            f"{python} has no {missing[1]} that every user can import ({torch.why})",
                            f"install it: {install_command}")
    if torch.why.startswith("MemoryError"):
        return Finding("torch", "failed", f"there is not enough memory to import it ({torch.why})",
                            "end what else runs there; a service of flowspec's: flowspec deploy stop")
    file = re.search(r"(lib\S+\.so\S*): cannot open shared object file", torch.why)
    library = shared_library_of(l4t, file[1]) if file and l4t else None
    return Finding("torch", "failed", f"{python} cannot import torch and numpy: {torch.why}",
                        f"install that library: {library.install}" if library else
                        f"install what is missing, or torch again: {install_command}")


def _gpu(torch: TorchFacts, l4t: str, torch_device: str, dtype: str, install_command: str, busy: bool
         ) -> Iterator[Finding]:
    """Judge what torch says of the GPU.

    A service for CUDA does not start without a GPU; a Jetson on its CPU is merely many times slower.
    """
    version, on_gpu = torch.version, torch_device.startswith("cuda")
    if on_gpu and not torch.cuda:
        cuda, why = torch.built_for, torch.gpu_fault
        build = f"built for CUDA {cuda}, " if cuda else "built without CUDA, "
        yield Finding(
            "torch", "failed",
            f"{version}, {build}sees no CUDA GPU{why and f' ({why})'}, and torch_device is "
                     f"{torch_device!r}",
            f'install the torch that was made for this board: {install_command}; or set torch_device = "cpu" for it in '
            "the cluster file")
    elif on_gpu and torch.gpu_fault:
        capability = ".".join(map(str, torch.cuda or ()))
        failure = (f"{version}: a product on {torch.gpu or 'the GPU'} (compute capability {capability}) "
                   f"fails: {torch.gpu_fault}")
        if busy:
            yield Finding("gpu", "warning", failure, "the service that runs there may hold the memory: "
                                                   "flowspec deploy stop, and try again")
        else:
            yield Finding("gpu", "failed", failure, f"install a torch with kernels for this GPU: {install_command}")
    elif l4t and torch_device == "cpu":
        yield Finding("torch", "warning", 'torch_device is "cpu", so this Jetson computes on its CPU',
                           'set torch_device = "cuda" in the cluster file')
    elif dtype in ("nf4", "fp4") and torch.cuda == ORIN and torch_device != "cpu":
        yield Finding(
            "torch", "warning",
            f"the weights are in {dtype}, whose matrices bitsandbytes expands on this GPU for every product "
            "of more than 4 rows",
            "use int4, which has a kernel for them: dtype in the cluster file, or shard the model again")
