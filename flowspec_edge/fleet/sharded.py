"""The sharded model that a deployment ships: the one that is given, or one that is cut here once.

Knows where a cut model is kept beside the cluster file, and that the same request is cut only once.
Does not know boards.
"""

from __future__ import annotations

from collections.abc import Callable

from flowspec_edge.errors import UsageError
from flowspec_edge.fleet.deployment import Deployment
from flowspec_edge.manifest import Manifest
from flowspec_edge.sharding.job import finished, run, total_size
from flowspec_edge.sharding.plan import make_plan, recipe_for
from flowspec_edge.sharding.source import open_source
from flowspec_edge.stage.shard_digest import shard_digest


def sharded_model(deployment: Deployment, progress: Callable[[int, int], None] = lambda done, total: None
                  ) -> Manifest:
    """The manifest, with its directory, of what the boards are to have.

    progress  is called with the bytes written so far and with all that are to be; not at all if nothing
              has to be written

    An interrupted run goes on where it was.  UsageError if a sharded model is given and lacks a part,
    FlowspecError for weights that cannot be read and for a full disk.
    """
    model = deployment.model
    if model.sharded:
        manifest = Manifest.read(model.path)
        if absent := [name for name in manifest.parts if not manifest.is_here(name)]:
            raise UsageError(f"{model.path} lacks {', '.join(absent)}: give the directory that "
                             "`flowspec models shard` wrote")
        return manifest
    source = open_source(str(model.path), [deployment.head] if deployment.head else [])
    plan = make_plan(source, recipe_for(source, deployment.dtype), deployment.ranges)
    out = deployment.work / "models" / plan.request[:16]
    if (found := finished(plan, out)) is not None:
        return found
    total, done = total_size(plan), 0

    def written(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return run(plan, out, written)


def digests_of(manifest: Manifest) -> list[str]:
    """What the stages will say of their shards in Hello, V1's first."""
    stages = len(manifest.ranges)
    return [shard_digest(manifest.directory, index, stages) for index in range(stages)]
