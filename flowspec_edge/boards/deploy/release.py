"""The boards' sharded model, and the files of a release: release.json, configuration, units.

A release's id is a hash of its files, which contain no date: the same input gives the same id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from flowspec_edge.boards import paths
from flowspec_edge.boards.deploy.resolve import Deployment
from flowspec_edge.boards.deploy.steps.power import power_script
from flowspec_edge.boards.inventory import DeviceEntry
from flowspec_edge.boards.links.addresses import network_address
from flowspec_edge.d0.config import DraftConfig
from flowspec_edge.drivers.ring import Ring
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.manifest import Manifest
from flowspec_edge.sharding.job import finished, run, total_size
from flowspec_edge.sharding.plan import make_plan, recipe_for
from flowspec_edge.sharding.source import open_source
from flowspec_edge.stage.weights.load import shard_digest
from flowspec_edge.util.resources import resource_dir

Files = dict[str, str]  # path in the release's directory -> text
_ID = 16  # hex digits
_PLACEHOLDER = "0" * _ID


def render(deployment: Deployment, manifest: Manifest, publics: Mapping[str, str], digests: Sequence[str],
           environments: Mapping[str, str]) -> tuple[str, dict[str, Files]]:
    """Return the release's id, and its files by board.

    manifest      of the sharded model, cut into the deployment's ranges
    publics       the boards' public CURVE keys, Z85, by board
    digests       of the stages' shards, V1's first, as in Hello; empty: any
    environments  the digests of the boards' venvs, by board

    Raise FlowspecError if the manifest has other ranges than the deployment, a key is missing, or a host name does
    not resolve.
    """
    if manifest.ranges != deployment.ranges:
        raise FlowspecError(f"{manifest.directory} is cut into {list(manifest.ranges)}, and the cluster's "
                            f"boards are to have {list(deployment.ranges)}: cut it again")
    for device in deployment.boards:
        if device.name not in publics:
            raise FlowspecError(f"{device.name}: its public key is missing in {deployment.keys}")
    cluster = _Rendering(deployment, manifest, publics, digests, environments)
    release = _digest(cluster.files(_PLACEHOLDER))[:_ID]
    return release, cluster.files(release)


def _digest(files: Mapping[str, Files]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


class _Rendering:
    def __init__(self, deployment: Deployment, manifest: Manifest, publics: Mapping[str, str],
                 digests: Sequence[str], environments: Mapping[str, str]) -> None:
        self._deployment, self._manifest, self._digests = deployment, manifest, list(digests)
        self._environments = environments
        self._boards = deployment.boards  # the ring: D0, V1 … VN
        self._keys = [publics[device.name] for device in self._boards]
        self._units = {f"units/{path.name}": path.read_text(encoding="utf-8")
                       for path in sorted((resource_dir("deploy") / "units").glob("*.service"))}
        cluster = deployment.cluster
        if cluster.in_image:
            self._units |= {name: in_image(text) for name, text in self._units.items()
                            if name != f"units/{paths.POWER_UNIT}"}
        addresses = [network_address(deployment.inventory, device) for device in self._boards]
        self._data = [f"tcp://{address}:{cluster.data_port}" for address in addresses]
        self._cache_rows = deployment.cache_rows
        self._control = f"tcp://{addresses[0]}:{cluster.control_port}"

    def files(self, release: str) -> dict[str, Files]:
        files: dict[str, Files] = {}
        for rank, device in enumerate(self._boards):
            name = f"etc/verify-{rank}.toml" if rank else "etc/draft.toml"
            text = self._worker(release, rank, device) if rank else self._draft(release)
            board = {"release.json": self._release(release, rank), name: text, **self._units}
            if mode := self._deployment.inventory.power_mode(device):
                board["etc/power-mode.sh"] = power_script(mode)
            else:
                board.pop(f"units/{paths.POWER_UNIT}", None)
            files[device.name] = board
        return files

    def _release(self, release: str, rank: int) -> str:
        fields: dict[str, Any] = {
            "id": release, "cluster": self._deployment.cluster.name, "version": version("flowspec-edge"),
            "role": "verify" if rank else "draft", "stage": rank,
            "layers": list(self._deployment.ranges[rank - 1]) if rank else None,
            "model": self._manifest.request, "environment": self._environments[self._boards[rank].name],
            "public_key": self._keys[rank]}
        return json.dumps(fields, indent=2, sort_keys=True) + "\n"

    def _worker(self, release: str, rank: int, device: DeviceEntry) -> str:
        return self._ring(release).config(
            rank, model=self._model, dtype=self._manifest.compute_dtype,
            device=self._deployment.inventory.torch_device(device), cache_rows=self._cache_rows,
            requests=self._deployment.at_once, key_file=paths.KEY, public_key=self._keys[rank]).dump()

    def _draft(self, release: str) -> str:
        cluster, ring = self._deployment.cluster, self._ring(release)
        return DraftConfig(
            cluster=cluster.name, model=self._model, name=self._manifest.source.name,
            strategy=cluster.strategy, draft=cluster.draft_kind,
            dtype=self._manifest.compute_dtype,
            device=self._deployment.inventory.torch_device(self._boards[0]), control=ring.control,
            output=ring.data[0], first=ring.data[1], instances=list(ring.instances), digests=self._digests,
            key_file=paths.KEY, public_key=self._keys[0], worker_keys=self._keys[1:], context=cluster.context,
            at_once=self._deployment.at_once, scheduling_policy=cluster.scheduling_policy,
            host=cluster.serve_host, port=cluster.serve_port, forwarded_allow_ips=cluster.forwarded_allow_ips,
            cors_origins=cluster.cors_origins,
            api_key_file=paths.API_KEY if cluster.serves_others else "").dump()

    def _ring(self, release: str) -> Ring:
        """Return the ring of the boards in ``release``.

        The release's id is part of the stages' instance ids, so D0 rejects stages of other releases.
        """
        instances = [f"v{stage}-{release[:8]}" for stage in range(1, len(self._boards))]
        return Ring(self._control, self._data, instances, self._keys)

    @property
    def _model(self) -> str:
        return paths.model_dir(self._manifest.request)


def in_image(unit: str) -> str:
    """Return the text of a service's unit where the runtime is an image: systemd joins sections of one name."""
    return f"{unit}\n{(resource_dir('deploy') / 'units' / paths.IMAGE_CONF).read_text(encoding='utf-8')}"


def sharded_model(deployment: Deployment, progress: Callable[[int, int], None] = lambda done, total: None
                  ) -> Manifest:
    """Return the manifest of the boards' model, and shard the model first if it is not sharded yet.

    Sharding resumes after an interrupted run.

    progress  called with the bytes written so far and the total; not called if nothing has to be written

    Raise UsageError if a given sharded model lacks a part, FlowspecError for unreadable weights or a full disk.
    """
    model = deployment.model
    if model.sharded:
        manifest = model.require_manifest()
        if absent := [name for name in manifest.parts if not manifest.has_part(name)]:
            raise UsageError(f"{model.path} lacks {', '.join(absent)}: give the directory that "
                             "`flowspec models shard` wrote")
        return manifest
    source = open_source(str(model.path), [deployment.head] if deployment.head else [])
    recipe = recipe_for(source, deployment.dtype, lm_head=deployment.lm_head,
                        kv_cache=deployment.cluster.kv_cache)
    plan = make_plan(source, recipe, deployment.ranges)
    out = deployment.work / "models" / plan.request[:16]
    if (complete := finished(plan, out)) is not None:
        return complete
    total, done_bytes = total_size(plan), 0

    def written(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        progress(done_bytes, total)

    return run(plan, out, written)


def digests_of(manifest: Manifest) -> list[str]:
    """Return the shard digests that stages report in Hello, V1's first."""
    return [shard_digest(manifest, index) for index in range(manifest.stages)]
