"""What installed packages offer under a group of entry points.

Names come from the packages' metadata; what is behind a name is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from flowspec_edge.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class EntryPointRegistry(Mapping[str, T]):
    """What this package has, by name, then what entry points offer; each is loaded when it is looked up."""

    def __init__(self, builtin: Collection[str], group: str, load: Callable[[str], T]) -> None:
        """Set up a table of names.

        ``builtin``: names of this package's; ``load``: called at every look-up; KeyError for an unknown name.
        """
        self._builtin, self._group, self._load = builtin, group, load

    def __getitem__(self, name: str) -> T:
        return self._load(name)

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in offered(self._group)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._builtin, *offered(self._group)]))

    def __len__(self) -> int:
        return len({*self._builtin, *offered(self._group)})


@cache
def offered(group: str) -> Mapping[str, EntryPoint]:
    """Find the entry points of a group by name; nothing is imported."""
    from importlib.metadata import entry_points

    return {entry_point.name: entry_point for entry_point in entry_points(group=group)}


def load_object(reference: str, description: str, form: str) -> Any:
    """Import what is at ``reference``, "package.module:name".

    Whatever the import raises becomes a UsageError that calls the object ``description``.  ``form`` says what a place
    must look like.
    """
    from flowspec_edge.util.working_directory import hidden_file

    module, _, attribute = reference.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise UsageError(f"cannot load the {description} {reference}: write {form}")
    try:
        return getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            reason += "; a module is found in the current directory or among the installed packages"
        if isinstance(error, AttributeError) and (hidden := hidden_file(module)):
            reason += f"; {hidden} was not read, because an installed module has that name: rename the file"
        raise UsageError(f"cannot load the {description} {reference}: {reason}") from error
