"""Web pages of other origins: what a browser asks before, and reads after (Fetch standard, CORS protocol)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.http_server import NAME, Held, running, served

from flowspec_edge.cli.serve.daemons import _service
from flowspec_edge.d0.config import DraftConfig
from flowspec_edge.errors import RequestFailed
from flowspec_edge.serving.intake import MAX_BODY_BYTES

PAGE, OTHER, KEY = "https://page.example:3000", "https://other.example", "correct horse"
ASK = {"model": NAME, "prompt": "abc", "max_tokens": 2}
BEARER = {"Authorization": f"Bearer {KEY}"}


def before(server: Any, origin: str, method: str = "POST", path: str = "/v1/completions") -> Any:
    """A browser's preflight, which has no key."""
    return server.http.options(path, headers={
        "Origin": origin, "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"})


def asked(server: Any, origin: str | None = PAGE, key: str | None = KEY, **fields: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return server.http.post("/v1/completions", json={**ASK, **fields},
                            headers=headers | ({"Origin": origin} if origin else {}))


def allowed(answer: Any) -> str | None:
    return answer.headers.get("access-control-allow-origin")  # type: ignore[no-any-return]


def test_a_page_that_may_ask(held: Held, model: Path) -> None:
    with running(served(model), held, api_key=KEY, cors_origins=(PAGE,)) as server:
        preflight = before(server, PAGE)
        assert (preflight.status_code, allowed(preflight)) == (200, PAGE)
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == \
               "authorization,content-type,x-stainless-os"
        assert "origin" in preflight.headers["vary"].lower()

        for stream in (False, True):
            answer = asked(server, stream=stream, made_up=1)
            assert (answer.status_code, allowed(answer)) == (200, PAGE)
            exposed = {name.strip().lower()
                       for name in answer.headers["access-control-expose-headers"].split(",")}
            ours = {name for name in answer.headers if name.startswith("x-")} - {"x-accel-buffering"}
            assert ours <= exposed
            assert {"x-request-id", "x-flowspec-ignored"} <= ours
            assert "origin" in answer.headers["vary"].lower()
        models = server.http.get("/v1/models", headers={"Origin": PAGE, **BEARER})
        assert (models.status_code, allowed(models)) == (200, PAGE)


def test_a_page_reads_errors_too(held: Held, model: Path) -> None:
    with running(served(model), held, api_key=KEY, cors_origins=(PAGE,)) as server:
        long = server.http.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1), headers={
            "Origin": PAGE, "Content-Type": "application/json", **BEARER})
        held.broken = RequestFailed("activations overflow float16")
        failed = asked(server)
        held.broken = None
        nowhere = server.http.get("/v1/nothing", headers={"Origin": PAGE, **BEARER})
        for answer, status in ((asked(server, key=None), 401), (asked(server, key="wrong"), 401),
                               (asked(server, max_tokens=-1), 400), (asked(server, model="b"), 404),
                               (nowhere, 404), (long, 413), (failed, 500)):
            assert (answer.status_code, allowed(answer)) == (status, PAGE), answer.text
            assert answer.json()["error"]["message"]


def test_another_page_may_not(held: Held, model: Path) -> None:
    with running(served(model), held, api_key=KEY, cors_origins=(PAGE, "http://localhost:8080")) as server:
        for origin in (OTHER, "https://page.example", "http://page.example:3000", "null",
                       f"{PAGE}.evil.example"):
            preflight, answer = before(server, origin), asked(server, origin)
            assert (preflight.status_code, allowed(preflight)) == (400, None)
            assert allowed(answer) is None
        assert before(server, PAGE, "DELETE").status_code == 400
        assert allowed(before(server, "http://localhost:8080")) == "http://localhost:8080"
        assert allowed(asked(server, None)) is None  # no page asks
        assert asked(server, None).status_code == 200


def test_all_pages_may(held: Held, model: Path) -> None:
    with running(served(model), held, api_key=KEY, cors_origins=("*",)) as server:
        for origin in (PAGE, OTHER, "null"):
            assert (before(server, origin).status_code, allowed(before(server, origin))) == (200, "*")
            assert allowed(asked(server, origin)) == allowed(asked(server, origin, key=None)) == "*"
            assert "access-control-allow-credentials" not in asked(server, origin).headers


def test_by_default_no_page_may(held: Held, model: Path) -> None:
    with running(served(model), held, api_key=KEY) as server:
        assert before(server, PAGE).status_code == 401
        assert not [name for name in asked(server).headers if name.startswith("access-control")]


def test_a_host_of_another_name_is_refused_whatever_the_page(held: Held, model: Path) -> None:
    """Without a key: a foreign name that resolves to loopback."""
    with running(served(model), held, cors_origins=(PAGE,)) as server:
        answer = server.http.post("/v1/completions", json=ASK,
                                  headers={"Origin": PAGE, "Host": "evil.example"})
        assert (answer.status_code, allowed(answer)) == (403, PAGE)


def configured(model: Path, *origins: str) -> DraftConfig:
    return DraftConfig(cluster="lab", model=str(model), name="m", control="tcp://127.0.0.1:1",
                       output="tcp://127.0.0.1:2", first="tcp://127.0.0.1:3", instances=["a"],
                       cors_origins=[*origins])


def test_the_deployed_service_has_the_configured_pages(model: Path) -> None:
    assert _service(configured(model, PAGE, "*"), None).cors_origins == [PAGE, "*"]


@pytest.mark.parametrize("wrong", ["page.example", f"{PAGE}/", f"{PAGE}/path", "HTTPS://page.example", ""])
def test_what_is_no_origin(model: Path, wrong: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        configured(model, wrong)
