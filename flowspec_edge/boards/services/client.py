"""HTTP client of a deployed draft service: through ssh, unless this machine is the draft board."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from flowspec_edge.boards.commands import SshRunner, end_process, is_here
from flowspec_edge.boards.inventory import DeviceEntry, Inventory, Unreached
from flowspec_edge.boards.probe.findings import in_one_line
from flowspec_edge.errors import FlowspecError, UsageError

_PATIENCE_S = 60.0  # without data: the service sends a line every few seconds while a request waits
_DATA = b"data: "


class DraftClient:
    """A client of the draft device's API, a context manager that closes its connections."""

    def __init__(self, inventory: Inventory, device: DeviceEntry, api_key: str | None = None) -> None:
        settings = inventory.cluster
        self._name, self._device = device.name, device
        self._host = settings.serve_address
        self._port = settings.serve_port
        try:
            self._ssh = None if is_here(inventory, device) else SshRunner(inventory, device)
        except Unreached as error:
            raise FlowspecError(in_one_line(device, error)) from error
        self._api_key = api_key
        self._open: list[_Connection] = []

    def model(self) -> str:
        with self._ask("GET", "/v1/models") as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
                raise FlowspecError(f"what answers on {self._name}, port {self._port}, is no draft service: "
                                    "see flowspec deploy status") from error

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the response's objects; raise UsageError for a rejected request, FlowspecError for a failure."""
        with self._ask("POST", path, {**body, "stream": True}) as response:
            try:
                yield from self._objects(response)
            except (OSError, HTTPException, ValueError) as error:
                raise FlowspecError(f"{self._name}: the connection broke during the answer: "
                                    f"{error}") from error

    def close(self) -> None:
        """Close the connections, which cancels their requests."""
        for connection in self._open:
            connection.close()
        self._open.clear()

    def __enter__(self) -> DraftClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _objects(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        for line in response:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA):].strip()
            if data == b"[DONE]":
                return
            item: dict[str, Any] = json.loads(data)
            if "error" in item:
                raise FlowspecError(f"{self._name}: {item['error']['message']}")
            yield item
        raise FlowspecError(f"{self._name}: the connection ended during the answer: see flowspec deploy logs")

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> HTTPResponse:
        connection = _Connection(self._host, self._port, self._ssh)
        self._open.append(connection)
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise self._silent() from error
        if response.status != 200:
            raise self._refused(response)
        return response

    def _silent(self) -> FlowspecError:
        if self._ssh is not None:
            try:
                self._ssh.run(["true"])
            except FlowspecError as error:  # ssh is the cause
                return FlowspecError(in_one_line(self._device, error))
        return FlowspecError(f"no draft service answers on {self._name}, port {self._port}: see flowspec "
                             "deploy status, or bring it there with: flowspec deploy up")

    def _refused(self, response: HTTPResponse) -> FlowspecError:
        try:
            message = str(json.loads(response.read())["error"]["message"])
        except (ValueError, KeyError, TypeError, HTTPException, OSError):
            return FlowspecError(f"what answers on {self._name}, port {self._port}, is no draft service: "
                                 f"HTTP status {response.status}")
        if response.status == 401:
            return UsageError(f"{self._name}: {message}; set FLOWSPEC_API_KEY to it")
        if response.status < 429:
            return UsageError(f"{self._name}: {message}")
        return FlowspecError(f"{self._name}: {message}; see flowspec deploy status")


class _Connection(HTTPConnection):
    """A connection to a port on a board, directly or through ssh."""

    def __init__(self, host: str, port: int, ssh: SshRunner | None) -> None:
        super().__init__(host, port, timeout=_PATIENCE_S)
        self._ssh = ssh
        self._client: subprocess.Popen[bytes] | None = None

    def connect(self) -> None:
        if self._ssh is None:
            super().connect()
            return
        local_end, client_end = socket.socketpair()
        with client_end:
            local_end.settimeout(_PATIENCE_S)
            self.sock = local_end
            self._client = subprocess.Popen(
                self._ssh.connecting(self.host, self.port), stdin=client_end.fileno(), stdout=client_end.fileno(),
                stderr=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C is for the caller

    def close(self) -> None:
        super().close()
        if self._client is not None:
            self._client.terminate()
            end_process(self._client)
