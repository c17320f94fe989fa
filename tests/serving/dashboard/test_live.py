"""What viewers are told, over real sockets and from real processes, held against the answers."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from kits.http_server import LONG, NAME, placed, post
from kits.process_clusters import PATIENCE, until
from kits.watched_server import STAGES, Watchable, Watched, Watcher, watchable, watched_cluster

from flowspec_edge.d0.run_events import StagesBack, StagesLost, StagesMissing
from flowspec_edge.lab.plain import PlainDecoder
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer
from flowspec_edge.sampling.rule import Sampling

PROMPT = "def f(x): return"
TOKENS = 48
STATES = {"drafted", "sent", "accepted", "pruned"}


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Watched]:
    with watched_cluster(model) as found:
        yield found


@pytest.fixture
def watched(cluster: Watched) -> Iterator[Watchable]:
    with watchable(cluster) as found:
        yield found


def ask(watched: Watchable, strategy: str = "flowspec", tokens: int = TOKENS) -> str:
    answer = watched.server.client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=tokens, extra_body={"flowspec": {"strategy": strategy}})
    return answer.choices[0].text


def flow_of(watcher: Watcher, session: int) -> list[dict[str, Any]]:
    events = [event for batch in watcher.named("flow") for event in batch["events"]]
    return [event for event in events if event.get("session") == session]


def last_session(watcher: Watcher) -> int:
    """Of the request that has the highest number, once it is over."""
    return max(event.get("session", 0) for batch in watcher.named("flow") for event in batch["events"])


def told_of(watched: Watchable, watcher: Watcher, strategy: str = "flowspec") -> int:
    """Ask, and wait until all is told; the session."""
    ends = watched.feed.stats.event([], 0.0)["total"]["requests"] + 1
    ask(watched, strategy)
    until(lambda: any(event["total"]["requests"] == ends for event in watcher.named("figures")))
    return last_session(watcher)


def test_figures_are_those_of_the_answer(watched: Watchable) -> None:
    with Watcher(watched.server.url) as watcher:
        told_of(watched, watcher, "chunk_pp")  # of a strategy with few answers, since the newest rounds count
        before = watched.feed.stats.event([], 0.0)
        told_of(watched, watcher, "chunk_pp")
        figures, boards = watcher.named("figures")[-1], watcher.named("boards")[-1]["boards"]
    stats = watched.recorder.results[-1].stats
    for name in ("tokens_per_second", "alt", "alr", "ttft_s"):
        assert figures[name] == getattr(stats, name)
    assert {name: figures["total"][name] - before["total"][name] for name in figures["total"]} == {
        "requests": 1, "tokens": TOKENS, "drafted": stats.drafted, "accepted": stats.accepted}
    assert (figures["running"], figures["waiting"]) == (0, 0)
    assert figures["rounds"] - before["rounds"] == stats.rounds
    assert figures["acceptance"] == sorted(figures["acceptance"], reverse=True)
    accepted = [sum(event["acceptance"]) * event["rounds"] for event in (before, figures)]
    assert accepted[1] - accepted[0] == pytest.approx(stats.accepted)
    assert [board["place"] for board in boards] == [0, 1, 2]
    assert all(board["memory_total"] > board["resident"] > 0 for board in boards)


def test_segments_are_those_of_the_stages_and_the_answer(watched: Watchable) -> None:
    with Watcher(watched.server.url) as watcher:
        assert watcher.events[0][0] == "cluster"
        session = told_of(watched, watcher)
    cluster = watcher.named("cluster")[0]
    assert [board["name"] for board in cluster["boards"]] == ["D0", "V1", "V2"]
    assert [board["layers"] for board in cluster["boards"]] == [None, [0, 1], [1, 2]]
    assert (cluster["state"], cluster["chat"], cluster["stages"]) == ("up", False, STAGES)
    result, flow = watched.recorder.results[-1], flow_of(watcher, session)
    rows: dict[int, dict[str, int]] = defaultdict(dict)
    for event in flow:
        if event["kind"] in ("sent", "computed", "returned"):
            place = f"V{event['place']}" if event["kind"] == "computed" else event["kind"]
            assert place not in rows[event["run"]]  # once
            assert rows[event["run"]] or place == "sent"  # first
            rows[event["run"]][place] = event["rows"]
    for run in rows.values():
        assert run["sent"] >= run.get("V1", 0) >= run.get("V2", 0) >= run.get("returned", 0)
    prompt = len(PROMPT)
    assert sum(run.get("returned", 0) for run in rows.values()) >= result.stats.verified + prompt
    for place, counters in enumerate(result.stats.stages, start=1):
        assert sum(run.get(f"V{place}", 0) for run in rows.values()) == counters["rows"]
    assert all(event["start"] <= event["end"] for event in flow if "start" in event)
    kinds = {event["kind"] for event in flow}
    assert {"draft", "verify", "pruned"} <= kinds
    assert [event["kind"] for event in flow].count("ended") == 1


@pytest.mark.parametrize("strategy", ["flowspec", "chunk_pp"])
def test_what_became_text_is_one_chain_through_all_trees(watched: Watchable, plain: PlainDecoder, model: Path,
                                                         strategy: str) -> None:
    with Watcher(watched.server.url) as watcher:
        session = told_of(watched, watcher, strategy)
    trees = [tree for tree in watcher.named("tree") if tree["session"] == session]
    assert [tree["over"] for tree in trees] == [False] * (len(trees) - 1) + [True]
    text, at = [], None
    ids: dict[str, set[int]] = {state: set() for state in STATES}
    for tree in trees:
        nodes = {node["id"]: node for node in tree["nodes"]}
        assert len(nodes) == len(tree["nodes"])
        assert {node["state"] for node in nodes.values()} <= STATES
        chain = [node for node in tree["nodes"] if node["state"] == "accepted"]
        for node in nodes.values():
            if node["parent"] != -1:
                assert node["depth"] == nodes[node["parent"]]["depth"] + 1
        assert [node["parent"] for node in chain] == [-1, *(node["id"] for node in chain[:-1])]
        root = chain[-1]
        assert (root["id"], root["depth"], root["text"]) == (tree["root"], 0, tree["root_text"])
        if at is None:
            text = [None] * (tree["position"] - len(PROMPT)) + [chain[0]["token"]]  # before anybody looked
        else:
            assert chain[0]["id"] == at
            text += [node["token"] for node in chain[1:]]
        at = tree["root"]
        for node in nodes.values():
            ids[node["state"]].add(node["id"])
    prompt = Tokenizer(OpenModel(model)).encode(PROMPT)
    expected = plain.generate(prompt, TOKENS, Sampling())[0]
    assert text == [None if seen is None else token for seen, token in zip(text, expected, strict=True)]
    assert ids["drafted"] | ids["sent"] <= ids["accepted"] | ids["pruned"]  # each had an end, and was told of
    assert not ids["accepted"] & ids["pruned"]


def test_plain_decoding_has_no_tree_and_guesses_nothing(watched: Watchable) -> None:
    with Watcher(watched.server.url) as watcher:
        session = told_of(watched, watcher, "autoregressive")
    assert [tree for tree in watcher.named("tree") if tree["session"] == session] == []


def test_the_tree_is_the_oldest_ones_that_has_one(cluster: Watched) -> None:
    """Beside a request without a tree that began before it."""
    with watchable(cluster, at_once=2) as watched, Watcher(watched.server.url) as watcher:
        for number, strategy in enumerate(("autoregressive", "flowspec"), start=1):
            post(watched.server, {"prompt": PROMPT, "max_tokens": LONG, "flowspec": {"strategy": strategy}})
            until(lambda n=number: placed(watched.server) == (n, 0))

        def both() -> list[dict[str, Any]]:
            return [figures for figures in watcher.named("figures") if len(figures["requests"]) == 2]

        until(lambda: bool(both()))
        plain, guessing = both()[-1]["requests"]
        assert (plain["tree"], guessing["tree"]) == (False, True)
        assert plain["session"] < guessing["session"]
        until(lambda: any(tree["session"] == guessing["session"] for tree in watcher.named("tree")))
        assert len(both()[-1]["requests"]) == 2


def test_concurrent_requests_are_listed(cluster: Watched) -> None:
    """With those that wait, in the order of their turns."""
    with watchable(cluster, at_once=2) as watched, Watcher(watched.server.url) as watcher:
        server = watched.server
        for number, priority in enumerate((0, -1, 0, 3, 2)):
            post(server, {"prompt": f"request {number}", "max_tokens": LONG, "priority": priority})
            until(lambda n=number: placed(server) == (min(n + 1, 2), max(0, n - 1)))

        def shown() -> list[dict[str, Any]]:
            return [figures for figures in watcher.named("figures") if figures["waiting"] == 3
                    and sum(one["itl_p50_s"] is not None for one in figures["requests"]) == 2]

        until(lambda: bool(shown()))
        figures = shown()[-1]
        first, second = figures["requests"]
        assert (first["priority"], second["priority"]) == (0, -1)
        assert second["number"] == first["number"] + 1
        assert first["session"] < second["session"]
        speeds = [one["tokens_per_second"] for one in (first, second)]
        assert figures["together"]["tokens_per_second"] == pytest.approx(sum(speeds))
        assert figures["together"]["fairness"] == pytest.approx(min(speeds) / max(speeds))
        assert first["share"] + second["share"] == pytest.approx(1)
        for one in (first, second):
            assert 0 < one["share"] < 1
            assert one["ttft_s"] > 0
            assert 0 <= one["itl_p50_s"] <= one["itl_p95_s"] <= one["itl_p99_s"]
        assert [(one["priority"], one["ahead"]) for one in figures["queue"]] == [(0, 1), (2, 2), (3, 3)]
        assert all(one["waited_s"] >= 0 for one in figures["queue"])
    with watchable(cluster) as watched, Watcher(watched.server.url) as watcher:
        assert watcher.wait("figures", running=0)["requests"] == []


def test_a_viewer_that_reads_nothing_holds_up_no_other(watched: Watchable) -> None:
    address = httpx2.URL(watched.server.url)
    with socket.create_connection((address.host, address.port)) as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.sendall(f"GET /live HTTP/1.1\r\nHost: {address.host}\r\n\r\n".encode())
        with Watcher(watched.server.url) as one, Watcher(watched.server.url) as other:
            session = told_of(watched, one)
            until(lambda: len(flow_of(other, session)) >= len(flow_of(one, session)))
            assert flow_of(one, session) == flow_of(other, session)


def test_without_a_viewer_nothing_is_timed_or_noted(watched: Watchable) -> None:
    until(lambda: not watched.feed.watched)
    ask(watched)  # the one that may have begun before
    before = watched.recorder.timed
    ask(watched)
    assert watched.recorder.timed == before
    assert watched.feed.take_flow() == []
    assert watched.feed.take_trees() == []


def test_a_loss_is_told_with_its_reason_and_so_is_the_end_of_it(watched: Watchable) -> None:
    with Watcher(watched.server.url) as watcher:
        watched.feed.observe(StagesLost(0.0, "V2 was switched off"))
        assert watcher.wait("cluster", state="lost")["reason"] == "V2 was switched off"
        watched.feed.observe(StagesBack(1.0))
        until(lambda: watcher.named("cluster")[-1]["state"] == "up")


def test_missing_stages_are_told_until_they_are_back(watched: Watchable) -> None:
    feed = watched.feed

    def told() -> list[tuple[bool, int, float | None]]:
        boards = watcher.named("cluster")[-1]["boards"]
        return [(board["lost"], board["losses"], board["away_s"]) for board in boards]

    with Watcher(watched.server.url) as watcher:
        before = [losses for _, losses, _ in told()]
        feed.observe(StagesMissing(10.0, [2]))
        until(lambda: [lost for lost, _, _ in told()] == [False, False, True])
        feed.observe(StagesMissing(11.0, [1, 2]))
        until(lambda: [lost for lost, _, _ in told()] == [False, True, True])
        feed.observe(StagesMissing(12.5, [1]))
        until(lambda: told()[2] == (False, before[2] + 1, 2.5))
        feed.observe(StagesBack(13.0))  # whatever was missing
        until(lambda: told()[1] == (False, before[1] + 1, 2.0))


def test_the_page_needs_no_key_and_what_it_shows_does(cluster: Watched) -> None:
    with watchable(cluster, api_key="secret") as watched:
        server = watched.server
        for path in ("/", "/page/main.js", "/page/style.css"):
            answer = server.http.get(path)
            assert answer.status_code == 200
            assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert server.http.get("/page/..%2fapp.py").status_code == 404
        assert server.http.get("/page/nothing.js").status_code == 404
        assert server.http.get("/live").status_code == 401
        assert server.http.get("/v1/models").status_code == 401
        with Watcher(server.url, {"Authorization": "Bearer secret"}) as watcher:
            assert watcher.named("cluster")[0]["needs_key"] is True
            server.admission.close()
            until(lambda: watcher.ended)  # a watcher does not keep the server from ending


def test_odd_paths_are_not_found(watched: Watchable) -> None:
    """Sent as they are: clients of HTTP tidy paths up."""
    host, port = watched.server.url.removeprefix("http://").split(":")
    for path in ("/page/" + "a" * 5000, "/page/a%00b.js", "/page/..%2f..%2fpages.py", "/page/..", "/page/.",
                 "/page/%2fetc%2fpasswd", "/page/main.js%00", "/page/%ff", "/page/main.js/", "/page/",
                 "/v1/models/" + "a" * 5000, "/v1/models/%00", "/v1/models/%ff/..", "/%0d%0ax", "/health/"):
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = connection.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 404 "), path
        assert len(answer) < 1000, path
