"""Where the files that come with the package lie: profiles, models, deployment templates.

Knows two places: the source tree (an editable install, a clone) and ``flowspec_edge/_data`` (an
installed wheel, see pyproject.toml).  Does not know what the files contain.
"""

from __future__ import annotations

from pathlib import Path

from flowspec_edge.errors import FlowspecError

_PACKAGE = Path(__file__).resolve().parent
KINDS = ("deploy", "profiles", "models")


def resource_dir(kind: str) -> Path:
    """The directory ``kind``: "deploy", "profiles" or "models"."""
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        if (root / kind).is_dir() and (root != _PACKAGE.parent or (root / "pyproject.toml").is_file()):
            return root / kind
    raise FlowspecError(f"the package is incomplete: no {kind}/ beside {_PACKAGE}; install it again")
