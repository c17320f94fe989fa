"""``python -m flowspec_edge.runtime.worker``."""

from __future__ import annotations

import sys

from flowspec_edge.runtime.worker.process import main

sys.exit(main())
