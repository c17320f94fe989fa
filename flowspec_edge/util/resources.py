"""The package's data files: in the source tree (editable install) or in ``flowspec_edge/_data`` (wheel)."""

from __future__ import annotations

from pathlib import Path

from flowspec_edge.errors import FlowspecError

_PACKAGE = Path(__file__).resolve().parent.parent
KINDS = ("deploy", "profiles", "models")


def in_package(path: Path) -> bool:
    """Whether ``path`` is in the package, or among the models that come with it."""
    resolved_path = path.resolve()
    return any(resolved_path.is_relative_to(root) for root in (_PACKAGE, resource_dir("models").resolve()))


def resource_dir(kind: str) -> Path:
    """Return the directory of bundled files of a ``kind``, one of ``KINDS``."""
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        if (root / kind).is_dir() and (root != _PACKAGE.parent or (root / "pyproject.toml").is_file()):
            return root / kind
    raise FlowspecError(f"the package is incomplete: no {kind}/ beside {_PACKAGE}; install it again")
