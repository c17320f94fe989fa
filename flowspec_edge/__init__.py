"""FlowSpec over small boards: pipelined tree speculative decoding of one large model.

Begin with :class:`Cluster`. The names are imported when first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's, which is not imported: an interpreter of ours begins with this module alone
if TYPE_CHECKING:
    from typing import Any

    from flowspec_edge.api import *  # noqa: F403

    __version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("flowspec-edge")
        except PackageNotFoundError:  # a source tree that is not installed
            return "0+source"
    if not name.startswith("_"):
        api = import_module("flowspec_edge.api")
        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "__version__", *import_module("flowspec_edge.api").__all__]
