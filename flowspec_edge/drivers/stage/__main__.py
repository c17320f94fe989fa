"""``python -m flowspec_edge.drivers.stage``."""

from __future__ import annotations

import sys

from flowspec_edge.drivers.stage.process import main

sys.exit(main())
