"""How this package starts Python: without the current directory among the places that imports search.

``python -c``, ``python -m`` and ``python -`` search the current directory before the standard library. It may
be the directory of a downloaded model, or a home directory with a ``random.py``. ``-P`` and PYTHONSAFEPATH
need Python 3.11, and boards have 3.10. ``-I`` also leaves out PYTHONPATH and the user's site-packages, which
may hold torch. So an interpreter runs ``-c`` with a text that first removes the current directory from
``sys.path``.

This module needs no more than Python 3.8 and its standard library, because a board's own Python runs it, too.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_SAFE = "import sys; sys.path[:] = filter(None, sys.path); "  # the current directory is ""
_EXEC = "exec(compile(sys.argv.pop(1), '<string>', 'exec'))"  # a text may begin with imports from __future__
_RUN = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
_LOADER = """import sys, types
for name, text in {sources!r}:
    sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec", dont_inherit=True), vars(sys.modules[name]))
sys.modules[{entry!r}].{call}
"""
_guarding = threading.RLock()


def module_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command that runs ``module`` as ``python -m`` does.

    ``python``: an interpreter other than this one, such as a board's; ``module`` must be installed for it.
    """
    return _command(_RUN, module, *arguments, python=python)


def code_command(text: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command that runs ``text`` as ``python -c`` does; ``python`` is :func:`module_command`'s."""
    return _command(_EXEC, text, *arguments, python=python)


def modules_program(modules: Sequence[ModuleType], entry: ModuleType, call: str) -> str:
    """Return a program for an interpreter without this package.

    It has ``modules``, in the order of their imports, then ``call`` of one of them, such as "main()".
    """
    sources = [(module.__name__, inspect.getsource(module)) for module in modules]
    return _LOADER.format(sources=sources, entry=entry.__name__, call=call)


def _command(begin: str, *arguments: str, python: str | None) -> list[str]:
    """Make a command; ``begin``: what runs once the current directory is left out; ``sys`` is imported."""
    return [python or sys.executable, "-c", (_SAFE if python else _safe_here()) + begin, *arguments]


@contextmanager
def guarded_starts(*functions: tuple[ModuleType, str]) -> Iterator[None]:
    """Do the same for the interpreters that ``multiprocessing`` starts meanwhile.

    These are its fork server, its resource tracker and spawned processes.
    ``functions``: the functions, by module and name, with which another library starts its processes.
    """
    from multiprocessing import util  # imported here: a command's help needs none of it

    with _guarding:
        before = [(module, name, getattr(module, name))
                  for module, name in ((util, "spawnv_passfds"), *functions)]
        for module, name, start in before:
            setattr(module, name, _guarded(start))
        try:
            yield
        finally:
            for module, name, start in before:
                setattr(module, name, start)


def leave_out_current_directory() -> None:
    """Remove the current directory from this process' ``sys.path``.

    ``python -m`` and an empty entry of PYTHONPATH put it there. A directory that PYTHONPATH names stays. For the
    start of a
    program of ours.
    """
    python_path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(python_path)
    # Libraries start interpreters, too, such as torch.compile; Python 3.11 and newer reads this variable.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        directory = os.getcwd()
    except FileNotFoundError:  # it has been removed, and nothing can be imported from it
        return
    if directory in map(os.path.abspath, python_path):
        return
    library = os.path.dirname(os.__file__)
    end = sys.path.index(library) if library in sys.path else 0  # what follows are installed packages
    sys.path[:end] = [entry for entry in sys.path[:end] if entry not in ("", directory)]


def _safe_here() -> str:
    """Return code that imports this process's package from where it is. What is beside the package is found last."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return (f"import sys; sys.path[:] = [{root!r}, *filter(None, sys.path)]; import flowspec_edge; "
            "sys.path.append(sys.path.pop(0)); ")


def _guarded(start: Any) -> Any:
    def guarded(*arguments: Any, **options: Any) -> Any:
        return start(*(_without_current_directory(argument) if isinstance(argument, list) else argument
                       for argument in arguments), **options)

    return guarded


def _without_current_directory(command: Sequence[Any]) -> list[Any]:
    """Return ``command`` with the same program, if it is an interpreter's with -c or -m."""
    for index, argument in enumerate(command):
        if argument == "-c":
            return [*command[:index + 1], _safe_here() + command[index + 1], *command[index + 2:]]
        if argument == "-m":
            return [*command[:index], "-c", _safe_here() + _RUN, *command[index + 1:]]
    return [*command]
