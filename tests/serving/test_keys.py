"""Who may use the endpoint, and where it may listen."""

from __future__ import annotations

import socket
from pathlib import Path

import openai
import pytest
from kits.http_server import NAME, Held, running, served

from flowspec_edge.boards.probe.onboard.service import ask_ready
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.serving.server import listen, url_of

KEY = "correct horse"


def test_only_who_has_the_key_is_let_in(held: Held, model: Path) -> None:
    with running(served(model), held, api_key=KEY) as server:
        assert [found.id for found in server.client.models.list()] == [NAME]
        for wrong in ("correct hors", "correct horse!", "ключ".encode().hex()):
            with pytest.raises(openai.AuthenticationError, match="incorrect API key") as caught:
                server.client.with_options(api_key=wrong).models.list()
            assert caught.value.code == "invalid_api_key"
        for header in ({}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
            for path in ("/v1/models", "/ready", "/v1/nothing"):
                assert server.http.get(path, headers=header).status_code == 401
        assert server.http.get("/health").status_code == 200
        [listed] = [found.model_dump() for found in server.client.models.list()]
        assert server.client.models.retrieve(NAME).model_dump() == listed
        admitted = listed["meta"]["n_ctx"]
        assert {listed[name] for name in ("max_model_len", "context_length", "context_window")} == {admitted}
        assert server.http.get("/ready", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_a_board_that_is_asked_for_its_status_finds_the_key(held: Held, model: Path, tmp_path: Path) -> None:
    right, several, wrong = tmp_path / "right", tmp_path / "several", tmp_path / "wrong"
    right.write_text(KEY)
    several.write_text(f"\n {KEY} \nof another client\n")
    wrong.write_text("correct hors")
    with running(served(model), held, api_key=several.read_text()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for file in (right, several):
            found = ask_ready(host, int(port), str(file))
            assert found["ready"] is True, found
        for file in (wrong, tmp_path / "none"):
            found = ask_ready(host, int(port), str(file))
            assert (found["ready"], str(file) in found["reason"]) == (False, True)


def test_others_may_reach_it_only_with_a_key() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(UsageError, match=r"others can reach .*: set FLOWSPEC_API_KEY"):
            listen(host, 0, None)
    with listen("0.0.0.0", 0, KEY) as open_to_all:
        assert open_to_all.getsockname()[0] == "0.0.0.0"
    with listen("localhost", 0, None) as local:
        assert url_of(local).startswith("http://")


def test_a_port_in_use_and_a_host_elsewhere_are_one_line() -> None:
    with (socket.create_server(("127.0.0.1", 0)) as other,
          pytest.raises(FlowspecError, match="Address already in use; choose with --host and --port")):
        listen("127.0.0.1", other.getsockname()[1], None)
    with pytest.raises(FlowspecError, match=r"cannot listen on 203\.0\.113\.7"):
        listen("203.0.113.7", 0, KEY)
    with pytest.raises(UsageError, match="no address for --host"):
        listen("no.such.host.invalid", 0, KEY)


def test_all_addresses_are_served_over_both_protocols() -> None:
    with listen("::", 0, KEY) as listener:
        assert url_of(listener).startswith("http://[::1]:")
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1]), 5).close()
    with listen("[::1]", 0, None) as listener:
        assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"
    with listen("0.0.0.0", 0, KEY) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")
