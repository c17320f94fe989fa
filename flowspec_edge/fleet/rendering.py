"""What lies in a release on each board, as text: release.json, the service's configuration, its units.

Pure but for looking addresses up and reading the units that come with the package.  The same input gives
the same texts and the same id, any other another: there is no date in them.  Does not know how they get
there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from flowspec_edge.errors import FlowspecError
from flowspec_edge.fleet import places
from flowspec_edge.fleet.deployment import Deployment
from flowspec_edge.fleet.inventory import DeviceEntry, resolve
from flowspec_edge.manifest import Manifest
from flowspec_edge.resources import resource_dir
from flowspec_edge.runtime.draftconfig import DraftConfig
from flowspec_edge.runtime.workerconfig import WorkerConfig

Files = dict[str, str]  # path below the release's directory -> text
_ID = 16  # hexadecimal digits of a release's id
_PLACEHOLDER = "0" * _ID


def render(deployment: Deployment, manifest: Manifest, publics: Mapping[str, str], digests: Sequence[str],
           environments: Mapping[str, str]) -> tuple[str, dict[str, Files]]:
    """The release's id, and by the boards' names their files.

    manifest      of the sharded model that the boards get, cut as the deployment says
    publics       the boards' public CURVE keys, Z85, by name
    digests       of the stages' shards, V1's first, as stages say them in Hello; empty: any
    environments  of the boards' venvs the digests, by name

    FlowspecError if the model was cut otherwise, a key is missing, or an address is unknown here.
    """
    if manifest.ranges != deployment.ranges:
        raise FlowspecError(f"{manifest.directory} is cut into {list(manifest.ranges)}, and the cluster's "
                            f"boards are to have {list(deployment.ranges)}: cut it again")
    for device in deployment.boards:
        if device.name not in publics:
            raise FlowspecError(f"{device.name}: there is no public key of it in {deployment.keys}")
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
        addresses = [resolve(device) for device in self._boards]
        self._data = [f"tcp://{address}:{cluster.data_port}" for address in addresses]
        self._control = f"tcp://{addresses[0]}:{cluster.control_port}"

    def files(self, release: str) -> dict[str, Files]:
        """All boards' files for a release of this id."""
        found = {}
        for place, device in enumerate(self._boards):
            name = f"etc/verify-{place}.toml" if place else "etc/draft.toml"
            text = self._worker(release, place, device) if place else self._draft(release)
            found[device.name] = {"release.json": self._release(release, place), name: text, **self._units}
        return found

    def _release(self, release: str, place: int) -> str:
        told: dict[str, Any] = {
            "id": release, "cluster": self._deployment.cluster.name, "version": version("flowspec-edge"),
            "role": "verify" if place else "draft", "stage": place,
            "layers": list(self._deployment.ranges[place - 1]) if place else None,
            "model": self._manifest.request, "environment": self._environments[self._boards[place].name]}
        return json.dumps(told, indent=2, sort_keys=True) + "\n"

    def _worker(self, release: str, place: int, device: DeviceEntry) -> str:
        following = (place + 1) % len(self._boards)
        return WorkerConfig(
            instance=_instance(release, place), stage=place, stages=len(self._boards) - 1,
            model=self._model, dtype=self._manifest.compute_dtype,
            device=self._deployment.inventory.torch_device(device), control=self._control,
            listen=self._data[place], next=self._data[following], key_file=places.KEY,
            control_key=self._keys[0], previous_key=self._keys[place - 1],
            next_key=self._keys[following]).dump()

    def _draft(self, release: str) -> str:
        cluster, stages = self._deployment.cluster, len(self._boards) - 1
        return DraftConfig(
            cluster=cluster.name, model=self._model, name=self._manifest.source.name,
            strategy=cluster.strategy, dtype=self._manifest.compute_dtype,
            device=self._deployment.inventory.torch_device(self._boards[0]), control=self._control,
            output=self._data[0], first=self._data[1],
            instances=[_instance(release, place) for place in range(1, stages + 1)], digests=self._digests,
            key_file=places.KEY, worker_keys=self._keys[1:], context=cluster.context,
            at_once=self._deployment.at_once, host=cluster.serve_host, port=cluster.serve_port,
            api_key_file=places.API_KEY if cluster.serves_others else "").dump()

    @property
    def _model(self) -> str:
        return places.model_dir(self._manifest.request)


def _instance(release: str, stage: int) -> str:
    """A stage of another release is a stranger to D0."""
    return f"v{stage}-{release[:8]}"
