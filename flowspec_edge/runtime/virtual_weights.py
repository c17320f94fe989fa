"""The weights of a cluster's stages in one process: loaded once, however many stages share them.

Knows that a checkpoint can be cut anywhere, and a sharded model only where it was.  Does not know
engines or time.
"""

from __future__ import annotations

from pathlib import Path

from flowspec_edge.stage.shard import Shard, is_sharded, load_shard, stage_ranges


class Weights:
    """The target in ``model_dir``, a checkpoint or a sharded model, on the torch device ``device``."""

    def __init__(self, model_dir: Path, dtype: str, device: str = "cpu") -> None:
        """Nothing is loaded yet."""
        self._model_dir, self._dtype, self._device = model_dir, dtype, device
        self._loaded: list[Shard] = []

    def shards(self, stages: int) -> list[Shard]:
        """The model in ``stages`` pieces, of which the last may be empty; they share all weights with
        those of any other number.

        Errors are those of :func:`~flowspec_edge.stage.shard.load_shard`.
        """
        ranges = stage_ranges(self._model_dir, stages, allow_empty=True)
        if not self._loaded:
            pieces = stages if is_sharded(self._model_dir) else 1
            self._loaded = [load_shard(self._model_dir, i, pieces, self._dtype, self._device)
                            for i in range(pieces)]
        if len(self._loaded) > 1:
            return self._loaded
        return [self._loaded[0].cut(i, stages, layers) for i, layers in enumerate(ranges)]
