"""What a run takes from a sharded model where its options say nothing.

Knows the defaults of --stages and --dtype.  Imports neither torch nor the runtime.
"""

from __future__ import annotations

from flowspec_edge.cli.options import Dtype, DtypeChoice
from flowspec_edge.errors import UsageError
from flowspec_edge.manifest import Manifest
from flowspec_edge.modeldir import ModelDir

_STAGES = 4


def stages_of(model: ModelDir, asked: int) -> int:
    """``--stages``; 0 is as many as a sharded model was cut into, or the paper's four."""
    if not model.sharded:
        return asked or _STAGES
    manifest = Manifest.read(model.path)
    if asked:
        manifest.check_stages(asked)
    return manifest.stages


def dtype_of(model: ModelDir, asked: DtypeChoice) -> Dtype:
    """``--dtype``; "auto" is what a sharded model was made to be computed in, or fp32."""
    if asked != "auto":
        return asked
    return Manifest.read(model.path).compute_dtype if model.sharded else "fp32"


def require_whole(model: ModelDir, strategy: str) -> None:
    """UsageError for a tensor-parallel ``strategy`` on a model that was cut for a pipeline."""
    if model.sharded:
        raise UsageError(f"{strategy} gives every device a slice of all layers, and {model.path} was cut for "
                         "a pipeline: use the checkpoint that it was made of, or leave this strategy out")
