"""``python -m flowspec_edge``: the ``flowspec`` command."""

from __future__ import annotations

import sys

from flowspec_edge.cli.main import main

sys.exit(main())
