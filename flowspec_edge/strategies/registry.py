"""Strategies by name: those of this package, and others' (entry points, or ``package.module:Class``)."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING

from flowspec_edge.errors import FlowspecError, RequestFailed, UsageError
from flowspec_edge.strategies.parameters import COMMON, DRAFTED, Parameter, Parameters, parameters
from flowspec_edge.util.entry_points import EntryPointRegistry, load_object, offered
from flowspec_edge.util.terminal import did_you_mean

if TYPE_CHECKING:
    from flowspec_edge.strategies.base import Parallelism, Strategy

ENTRY_POINTS = "flowspec.strategies"  # the group under which a package offers its strategies

_BUILTIN = {
    "autoregressive": "autoregressive:Autoregressive",
    "chunk_pp": "synchronous:ChunkPP",
    "pruned_pp": "flowspec:PrunedPP",
    "flowspec_no_sbd": "flowspec:FlowSpecNoSBD",
    "flowspec": "flowspec:FlowSpec",
    "flowspec_plus": "flowspec_plus:FlowSpecPlus",
    "chain": "layered:Chain",
    "pipedec": "layered:PipeDec",
    "pipeinfer": "pipeinfer:PipeInfer",
    "pearl": "pearl:Pearl",
    "speculative": "synchronous:Speculative",
    "stpp": "synchronous:STPP",
    "megatron": "synchronous:Megatron",
    "galaxy": "synchronous:Galaxy",
}


def _builtin_strategy(name: str) -> type[Strategy] | None:
    """Import a strategy of this package."""
    if name not in _BUILTIN:
        return None
    module, _, attribute = _BUILTIN[name].partition(":")
    strategy: type[Strategy] = getattr(import_module(f"flowspec_edge.strategies.{module}"), attribute)
    return strategy


# Names need no numpy: a strategy is imported when it is looked up.
STRATEGIES: Mapping[str, type[Strategy]] = EntryPointRegistry(
    _BUILTIN, ENTRY_POINTS, lambda name: (_builtin_strategy(name) or _loaded.get(name)
                                          or _load(offered(ENTRY_POINTS)[name].value)))
_loaded: dict[str, type[Strategy]] = {}  # from elsewhere, once named


def strategy_names() -> list[str]:
    """List this package's strategies, then those of entry points, then those loaded by module and class."""
    return list(dict.fromkeys([*STRATEGIES, *_loaded]))


def title_of(name: str) -> str:
    """Return what a strategy is called in figures and on the page; its name if it cannot be loaded."""
    if name in STRATEGIES or name in _loaded:  # a report may have others
        with suppress(UsageError):
            return strategy_class(name).title
    return name


def strategy_class(name: str) -> type[Strategy]:
    """Find a strategy by its name, or import it from "package.module:Class".

    The package is installed or in the current directory; once imported, the strategy's own name works, too.
    UsageError for an unknown name (with the known ones), or if the import fails or is no strategy.
    """
    require_strategy(name)
    if name in STRATEGIES:
        return STRATEGIES[name]
    if name in _loaded:
        return _loaded[name]
    from flowspec_edge.util.working_directory import look_in_working_directory

    look_in_working_directory(name.partition(":")[0])
    return _load(name)


@contextmanager
def strategy_meanwhile(reference: str) -> Iterator[str]:
    """Load a strategy by its "package.module:Class" and yield its name, which is known within the block alone."""
    name = strategy_class(reference).name
    try:
        yield name
    finally:
        _loaded.pop(name, None)


def require_strategy(name: str) -> None:
    """Raise UsageError for an unknown name; nothing is imported."""
    if name in STRATEGIES or name in _loaded or ":" in name:
        return
    raise UsageError(f"no strategy {name!r}; {did_you_mean(name, strategy_names())}"
                     f"there are {', '.join(strategy_names())}")


def common_parallelism(names: Iterable[str]) -> Parallelism:
    """Return the parallelism that all these strategies need; a pipeline if there are none.

    UsageError if they differ.
    """
    kinds: set[Parallelism] = {strategy_class(name).parallelism for name in names} or {"pipeline"}
    if len(kinds) > 1:
        raise UsageError("concurrent requests must share one kind of parallelism, "
                         f"not {' and '.join(sorted(kinds))}")
    return kinds.pop()


def groups(names: Iterable[str]) -> list[str]:
    """Select the strategies whose devices share every layer, which exist in virtual time only."""
    return [name for name in dict.fromkeys(names) if strategy_class(name).parallelism != "pipeline"]


def groups_note(names: Iterable[str]) -> str:
    """Return what a table of these strategies says of :func:`groups`; "" without one."""
    loaded = [name for name in names if name in STRATEGIES or name in _loaded]  # a report may have others
    titles = " and ".join(map(title_of, groups(loaded)))
    return f"{titles}: computed whole, charged as groups of devices" if titles else ""


def require_pipelines(names: Iterable[str]) -> None:
    """Raise UsageError for a strategy that processes and boards cannot run."""
    for name in groups(names):
        raise UsageError(f"{name} exists in virtual time only, computed whole and charged as a group of devices "
                         f"that share every layer; try: flowspec bench run --strategies chunk_pp,{name}")


def parameters_of(strategy: type[Strategy]) -> dict[str, Parameter]:
    """Return the parameters that ``strategy`` reads by name, its own first."""
    own_parameters, shared = parameters(strategy.parameters), parameters(Parameters)
    specific = [name for name in own_parameters if name not in shared]
    return {name: own_parameters[name] for name in (*specific, *(DRAFTED if strategy.drafter else ()), *COMMON)}


def declared_by_strategies() -> list[type[Parameters]]:
    """Return what all strategies declare, without entry points that cannot be loaded."""
    parameter_classes = []
    for name in strategy_names():
        with suppress(UsageError):
            parameter_classes.append(strategy_class(name).parameters)
    return list(dict.fromkeys(parameter_classes))


def _load(reference: str) -> type[Strategy]:
    """Import a strategy from elsewhere."""
    from flowspec_edge.strategies.base import Strategy

    strategy = load_object(reference, "strategy", "package.module:Class, without a path, such as "
                                              "my_package.module:MyStrategy")
    if not (inspect.isclass(strategy) and issubclass(strategy, Strategy)) or inspect.isabstract(strategy):
        raise UsageError(f"{reference} is not a strategy: a complete subclass of flowspec_edge.Strategy")
    name, summary = (getattr(strategy, key, None) for key in ("name", "summary"))
    if not (isinstance(name, str) and name.isidentifier() and isinstance(summary, str)):
        raise UsageError(f"{reference} needs two class attributes: name, an identifier, and summary")
    if not isinstance(strategy.title, str):
        raise UsageError(f"{reference} has a title that is no text: {strategy.title!r}")
    declared = strategy.parameters
    if not (inspect.isclass(declared) and issubclass(declared, Parameters)):
        raise UsageError(f"{reference} must declare its parameters as a dataclass that is derived from "
                         f"flowspec_edge.Parameters, not {declared!r}")
    if bare := [name for name in declared.__dataclass_fields__ if name not in parameters(declared)]:
        raise UsageError(f"{reference} does not describe its parameter {bare[0]}: it needs "
                         'Annotated[int, "meaning"] or the like, and a default')
    for parameter in parameters(declared).values():
        try:
            parameter.check(parameter.default)
        except UsageError as error:
            raise UsageError(f"{reference} has a default that it does not allow: {error}") from error
    registered = _builtin_strategy(name) or _loaded.get(name) or _loaded.setdefault(name, _located(strategy))
    if strategy not in (registered, *registered.__bases__):
        raise UsageError(f"{reference} has the name of another strategy, {name}: give it its own")
    return registered


def _located(strategy: type[Strategy]) -> type[Strategy]:
    """Derive a class whose methods and properties raise RequestFailed for whatever ``strategy`` raises.

    The error names file and line.  ``sys.exit`` is included.
    """
    from flowspec_edge.strategies.base import Strategy

    source = inspect.getsourcefile(strategy)

    def located(method: Callable[..., object]) -> Callable[..., object]:
        @wraps(method)
        def call(*values: object, **keywords: object) -> object:
            try:
                return method(*values, **keywords)
            except FlowspecError:
                raise
            except (Exception, SystemExit) as error:
                frames = traceback.extract_tb(error.__traceback__)
                locations = [f"{frame.filename}:{frame.lineno}" for frame in frames if frame.filename == source]
                location = locations[-1] if locations else f"{source}, {method.__qualname__}"
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise RequestFailed(f"the strategy {strategy.name} failed: {reason} ({location})") from error
        return call

    members: dict[str, object] = {}
    for name, member in inspect.getmembers(Strategy):
        attribute = inspect.getattr_static(strategy, name)
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            members[name] = located(getattr(strategy, name))
        elif isinstance(member, property) and isinstance(attribute, property) and attribute.fget:
            members[name] = property(located(attribute.fget))
        elif inspect.ismethod(member) and isinstance(attribute, classmethod):
            members[name] = classmethod(located(attribute.__func__))
    identity = {name: getattr(strategy, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(strategy.__name__, (strategy,), {**members, **identity})
