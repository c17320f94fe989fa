"""Everything that a worker imports before it has its weights, in one place, for a nursery."""

from __future__ import annotations

import flowspec_edge.runtime.worker
import flowspec_edge.stage.engine
import flowspec_edge.stage.shard
import flowspec_edge.stage.tensor_engine
import flowspec_edge.stage.tensor_group
import flowspec_edge.stage.tensor_shard  # noqa: F401
