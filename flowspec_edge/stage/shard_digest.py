"""What a stage of a sharded model will call its shard when it says Hello, told without loading it.

Knows which tensors of a part are a stage's own.  Does not know who compares the digests.
"""

from __future__ import annotations

from pathlib import Path

from flowspec_edge.manifest import Manifest, stage_part
from flowspec_edge.stage.checkpoint import Checkpoint
from flowspec_edge.stage.keys import harmless


def shard_digest(model_dir: Path, index: int, stages: int) -> str:
    """``load_shard(model_dir, index, stages, …).digest``, in hexadecimal; both ends of tensors are read.

    index  the stage, from 0

    UsageError if ``model_dir`` is not a sharded model, or was not cut into ``stages``; FlowspecError for
    files that are not there, or damaged.
    """
    manifest = Manifest.read(model_dir)
    manifest.check_stages(stages)
    checkpoint = Checkpoint(manifest.directory / stage_part(index))
    return checkpoint.digest(name for name in checkpoint.names if not harmless(name))
