"""The page in a real browser, over real processes: what it shows is what happens."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.browser import DESK, PHONE, await_boards, loaded, needs_browser, painted, say, scrolls_sideways, visit
from kits.http_server import LONG, placed, post
from kits.hypothesis_examples import examples
from kits.process_clusters import PATIENCE, until
from kits.rail_files import board
from kits.requests import continued
from kits.tiny_model_dir import never_ends, tiny_model_dir
from kits.watched_server import Watchable, Watched, watchable, watched_cluster
from playwright.sync_api import Browser, Locator, Page, expect

from flowspec_edge.drivers.observe.power import board_meter
from flowspec_edge.model.opened import OpenModel

# Of every visible text: [words, contrast with the nearest background that is not transparent]
CONTRASTS = """() => {
    const linear = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const luminance = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(linear);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        const {backgroundColor} = getComputedStyle(element);
        return backgroundColor === "rgba(0, 0, 0, 0)" ? ground(element.parentElement) : backgroundColor;
    };
    return [...document.querySelectorAll("body *")]
        .filter((element) => element.checkVisibility() && [...element.childNodes].some(
            (node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim()))
        .map((element) => {
            const pair = [luminance(getComputedStyle(element).color), luminance(ground(element))];
            return [element.textContent.trim(), (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05)];
        });
}"""
PROMPT = "def f(x): return"
CONTINUED = 256  # tokens, chat.js
# By path: where every element is, and how large, besides those of the log, the bars, and numbers of any width
PLACES = """() => Object.fromEntries([...document.querySelectorAll("body *")]
    .filter((element) => element.checkVisibility({visibilityProperty: true})
        && !element.matches("#log *, #acceptance *, dd *, .meter b"))
    .map((element) => {
        const {left, top, width, height} = element.getBoundingClientRect(), path = [];
        for (let at = element; at !== document.body; at = at.parentElement)
            path.unshift(at.id || `${at.tagName} ${[...at.parentElement.children].indexOf(at)}`);
        return [path.join(" > "), [left + scrollX, top + scrollY, width, height].map(Math.round)];
    }))"""
# Grow a tree, of which the next event cuts a part. Then, of every label: its text, how many pixels it has,
# and how many of them are not those of the text alone
LABELS = """async ([events, rows]) => {
    const {growTree, clearTree} = await import("/page/tree.js");
    const canvas = document.querySelector("#tree"), draw = canvas.getContext("2d");
    const [clear, fill] = [draw.clearRect, draw.fillText];
    let labels = [];
    draw.clearRect = (...box) => { labels = []; clear.apply(draw, box); };
    draw.fillText = (text, x, y) => {
        const {font, fillStyle, globalAlpha, textAlign, textBaseline} = draw;
        labels.push({text, x, y, style: {font, fillStyle, globalAlpha, textAlign, textBaseline}});
        fill.call(draw, text, x, y);
    };
    canvas.style.flex = "none";
    canvas.style.height = `${rows}px`;
    const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
    clearTree();
    for (const event of events) {
        growTree(event);
        for (let i = 0; i < 4; i += 1) await frame();
    }
    delete draw.clearRect;
    delete draw.fillText;
    const alone = document.createElement("canvas"), other = alone.getContext("2d");
    const panel = getComputedStyle(document.documentElement).getPropertyValue("--panel");
    [alone.width, alone.height] = [canvas.width, canvas.height];
    const onPanel = (image, box) => {
        other.globalAlpha = 1;
        other.fillStyle = panel;
        other.fillRect(0, 0, alone.width, alone.height);
        image();
        return other.getImageData(...box).data;
    };
    const found = labels.map(({text, x, y, style}) => {
        const box = [Math.round(x), Math.round(y) - 5, Math.ceil(draw.measureText(text).width), 10];
        const shown = onPanel(() => other.drawImage(canvas, 0, 0), box);
        const wanted = onPanel(() => { Object.assign(other, style); other.fillText(text, x, y); }, box);
        return [text, shown.length / 4, shown.filter((value, i) => Math.abs(value - wanted[i]) > 24).length];
    });
    canvas.removeAttribute("style");
    clearTree();
    return found;
}"""
pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return never_ends(tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2, hidden=32, vocab=97))


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """On one board, which draws 9.5 W."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWSPEC_SYSFS", str(board(tmp_path_factory.mktemp("board"), 9.5)))
        with board_meter() as meter, watched_cluster(model, meter) as found:
            yield found


@pytest.fixture(scope="module")
def page(browser: Browser, cluster: Watched) -> Iterator[Page]:
    with loaded(browser, cluster) as page:
        yield page


@pytest.fixture
def watched(cluster: Watched) -> Iterator[Watchable]:
    with watchable(cluster) as found:
        yield found


def bars_fit_their_scale(page: Page) -> bool:
    """Whether the bars are as high as their shares of the way from 0 to 100 % on the scale."""
    return bool(page.evaluate("""() => {
        const middle = (label) => label.getBoundingClientRect().top + label.offsetHeight / 2;
        const [whole, , none] = [...document.querySelectorAll(".scale span")].map(middle);
        return [...document.querySelectorAll("#acceptance span")].every((column) => {
            const share = column.title.match(/: (\\d+) %/)[1] / 100;
            return Math.abs(column.firstChild.getBoundingClientRect().height - share * (none - whole)) < 2;
        });
    }"""))


def colours(card: Locator) -> set[str]:
    """Of everything that is shown on it."""
    return set(card.evaluate("""(card) => [card, ...card.querySelectorAll("*")]
        .filter((element) => element.checkVisibility() && element.textContent)
        .flatMap((element) => [getComputedStyle(element).color, getComputedStyle(element).borderColor])"""))


def tree_events(seed: int) -> list[dict[str, Any]]:
    """A tree, and the same after its root's best child became text: the other branches are cut."""
    draw = random.Random(seed)
    nodes: list[dict[str, Any]] = [
        {"id": 0, "parent": -1, "depth": 0, "score": 0.0, "text": "root", "token": 0, "state": "accepted"}]
    for number in range(1, 60):
        parent = nodes[draw.choice((0, number // 2, number - 1))]
        nodes.append({"id": number, "parent": parent["id"], "depth": parent["depth"] + 1, "token": number,
                      "score": parent["score"] - draw.random(), "state": draw.choice(("sent", "drafted")),
                      "text": draw.choice(("the", "of", "----", "model"))})
    best = max((node for node in nodes if node["parent"] == 0), key=lambda node: node["score"])["id"]
    below = {best}
    for node in nodes:
        below |= {node["id"]} if node["parent"] in below else set()
    later = [node | {"depth": node["depth"] - 1,
                     "state": "accepted" if node["id"] in (0, best) else
                     node["state"] if node["id"] in below else "pruned"} for node in nodes]
    tree = {"session": seed + 1, "root_text": "root", "over": False}
    return [tree | {"at": 1, "position": 9, "root": 0, "nodes": nodes},
            tree | {"at": 2, "position": 10, "root": best, "nodes": later}]


def test_it_shows_the_boards_the_answer_the_tree_and_the_figures(browser: Browser, watched: Watchable,
                                                                 model: Path) -> None:
    with visit(browser, watched.server.url) as page:
        expect(page.locator("#state")).to_have_attribute("data-state", "up")
        expect(page.locator("#hint")).to_be_visible()
        energy = page.locator("#joules_per_token")
        expect(energy).to_have_text("–")  # no answer yet
        say(page, PROMPT)
        tree = page.locator("#tree")
        expect(tree).to_have_attribute("data-grown", re.compile("[1-9]"))  # counts on: an answer may be quick
        expect(page.locator("#stop")).to_be_hidden()
        assert page.locator(".asked").text_content() == PROMPT
        assert page.locator(".answer").text_content() == continued(OpenModel(model), PROMPT, CONTINUED)[1]
        expect(tree).to_have_attribute("data-pruned", re.compile("[1-9]"))
        expect(page.locator("#tokens_per_second")).to_have_text(re.compile(r"\d"))
        expect(page.locator("#alt")).to_have_text(re.compile(r"\d"))
        expect(page.locator("#ttft_s")).to_have_text(re.compile(r"\d"))
        expect(energy).to_have_text(re.compile(r"\d J"))
        # The processes share a machine: what is the machine's is shown once, above them.
        expect(page.locator("#pipeline-title")).to_have_text("The boards: processes of one machine")
        expect(page.locator("#machines li")).to_have_count(1)
        expect(page.locator("#machines")).to_contain_text(re.compile(r"\d of \d+ GB.*9\.5 W"))
        expect(page.locator("#boards")).not_to_contain_text(re.compile(r" of |9\.5 W"))
        expect(page.locator("#boards li").nth(1)).to_contain_text(re.compile(r"\d MB"))
        expect(page.locator("#acceptance span")).to_have_count(12)
        until(lambda: bars_fit_their_scale(page))
        expect(page.locator("#boards li").nth(1)).to_contain_text(re.compile(r"\d+ rows/s"))
        until(lambda: painted(page, "#rail") and painted(page, "#tree"))


def test_it_shows_requests_side_by_side_and_what_waits(browser: Browser, cluster: Watched) -> None:
    with (watchable(cluster, at_once=2) as watched,
          visit(browser, watched.server.url, viewport=PHONE) as page):
        server = watched.server
        section, rows = page.locator("#requests"), page.locator("#requests tbody tr")
        expect(section).to_be_hidden()
        for number, priority in enumerate((0, -1, 2)):
            post(server, {"prompt": f"request {number}", "max_tokens": LONG, "priority": priority})
            until(lambda n=number: placed(server) == (min(n + 1, 2), max(0, n - 1)))
        expect(rows).to_have_count(3)
        expect(page.locator("#together")).to_have_text(re.compile(
            r"Together [\d.]+ tokens a second; the slowest has \d+ % of the fastest one's\."))
        for row, name in enumerate((r"\d+", r"\d+, priority −1")):
            cells = rows.nth(row).locator("th, td")
            expect(cells).to_have_count(8)
            expect(cells.first).to_have_text(re.compile(f"^{name}$"))
            for cell in (2, 3, 4, 5, 6, 7):
                expect(cells.nth(cell)).to_have_text(re.compile(r"^\d"))
        expect(rows.nth(2)).to_have_text(re.compile(r"waits, priority 2\s*1 before it, for"))
        assert not scrolls_sideways(page)
        contrasts = page.evaluate(CONTRASTS)
        assert {words: ratio for words, ratio in contrasts if ratio < 4.5} == {}
        for connection in server.connections:
            connection.close()
        expect(section).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_keyboard_and_contrast_in_both_colour_schemes(
        browser: Browser, watched: Watchable, scheme: str) -> None:
    with visit(browser, watched.server.url, color_scheme=scheme) as page:
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 30
        assert {words: ratio for words, ratio in contrasts if ratio < 4.5} == {}  # WCAG 2, level AA
        grounds = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(grounds) < 40) == (scheme == "dark")
        reached = []
        for _ in range(8):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert reached[:6] == ["log", "BUTTON", "BUTTON", "BUTTON", "prompt", "send"]
        unnamed = "canvas:not([aria-label]), [role=meter]:not([aria-valuenow]), img:not([alt])"
        assert page.locator(unnamed).count() == 0


def test_a_phone_has_it_all_in_one_column(browser: Browser, watched: Watchable) -> None:
    with visit(browser, watched.server.url, viewport=PHONE, reduced_motion="reduce") as page:
        assert not scrolls_sideways(page)
        page.set_viewport_size({"width": 360, "height": 740})
        assert not scrolls_sideways(page)
        until(lambda: painted(page, "#rail"))


def test_a_lost_board_is_marked_until_it_is_back(browser: Browser, model: Path, tmp_path: Path) -> None:
    """V2 is killed in the middle of an answer, and cannot start while its shard is not there."""
    copy, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(model, copy)
    with (watched_cluster(copy, rejoin_within=PATIENCE) as cluster, watchable(cluster) as watched,
          visit(browser, watched.server.url) as page):
        boards, rail = page.locator("#boards li"), page.locator("#rail")
        say(page, PROMPT, LONG)
        expect(page.locator(".answer")).to_have_text(re.compile("."))
        expect(rail).to_have_attribute("aria-label", re.compile("Segments are on their way"))
        (copy / "target").rename(away)
        os.kill(cluster.clusters.pids[1], signal.SIGKILL)
        expect(page.locator("#state")).to_have_text(re.compile("^V2 was killed"))
        expect(boards.nth(2)).to_have_attribute("data-lost", "")
        expect(boards.nth(2)).to_contain_text("lost")
        expect(page.locator("#boards li[data-lost]")).to_have_count(1)
        assert colours(boards.nth(2)) != colours(boards.nth(1))
        expect(rail).to_have_attribute("data-lost", "2")
        expect(rail).to_have_attribute("aria-label", "No segment is on its way")
        away.rename(copy / "target")
        expect(page.locator("#boards li[data-lost]")).to_have_count(0)
        expect(rail).to_have_attribute("data-lost", "")
        expect(page.locator("#state")).to_have_attribute("data-state", "up")
        expect(boards.nth(2)).to_contain_text(re.compile(r"lost once, for \d+\.\d s"))
        expect(boards.nth(1)).not_to_contain_text("lost")
        assert colours(boards.nth(2)) == colours(boards.nth(1))  # it is well: nothing of it is red any more
        expect(rail).to_have_attribute("aria-label", re.compile("Segments are on their way"))
        page.click("#stop")
        expect(page.locator(".note")).to_have_text("stopped")
        expect(rail).to_have_attribute("aria-label", "No segment is on its way")


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize(("depth", "leaves"), [(8, 122), (40, 30), (3, 6)])
def test_no_tree_is_clipped(browser: Browser, watched: Watchable, size: dict[str, int], depth: int,
                            leaves: int) -> None:
    """The widest trees that the strategies gave, and a deeper one: nothing is drawn at the canvas' ends."""
    with visit(browser, watched.server.url, viewport=size, reduced_motion="reduce") as page:
        ends = page.evaluate("""async ([depth, leaves]) => {
            const {growTree} = await import("/page/tree.js");
            const node = (id, parent, depth, state) =>
                ({id, parent, depth, text: "guessed", score: -((id * 7) % 5), token: id, state});
            const nodes = [node(0, -1, 0, "accepted")];
            for (let i = 1; i <= depth; i += 1) nodes.push(node(i, i - 1, i, "sent"));  // one long branch
            for (let i = 1; i < leaves; i += 1) {
                const parent = nodes[(i * 5) % depth];
                nodes.push(node(1000 + i, parent.id, parent.depth + 1, i % 2 ? "drafted" : "sent"));
            }
            growTree({session: 1, at: 1, position: 9, root: 0, root_text: "x", over: false, nodes});
            const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
            for (let i = 0; i < 9; i += 1) await frame();
            const canvas = document.querySelector("#tree"), {width, height} = canvas;
            const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
            const at = (x, y) => data[4 * (y * width + x) + 3];
            const all = (count, of) => [...Array(count).keys()].reduce((sum, i) => sum + of(i), 0);
            return {top: all(width, (x) => at(x, 0)), bottom: all(width, (x) => at(x, height - 1)),
                    right: all(height, (y) => at(width - 1, y)), painted: data.filter((one) => one).length};
        }""", [depth, leaves])
        assert ends.pop("painted") > 1000
        assert ends == {"top": 0, "bottom": 0, "right": 0}


def test_reasoning_is_shown_apart_from_the_answer(page: Page) -> None:
    told = page.evaluate("""async () => {
        const {answer} = await import("/page/answers.js");
        const chunk = (delta) => `data: ${JSON.stringify({choices: [{delta}]})}\\n\\n`;
        const sent = chunk({reasoning_content: "wh"}) + chunk({reasoning_content: "y"}) + chunk({content: "Hello"});
        const usual = window.fetch;
        window.fetch = async () => new Response(sent + "data: [DONE]\\n\\n");
        let text = "", thought = "";
        try {
            await answer({messages: []}, {onText(piece) { text += piece; }, onNote() {},
                                          onThought(piece) { thought += piece; }});
        } finally { window.fetch = usual; }
        return [thought, text];
    }""")
    assert told == ["why", "Hello"]


@examples(100, 25)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(-9, 0)), max_size=150))
def test_no_two_nodes_of_a_tree_stand_in_one_place(page: Page, drawn: list[tuple[int, int]]) -> None:
    nodes = [{"id": 0, "parent": -1, "depth": 0, "score": 0}]
    for number, (pick, score) in enumerate(drawn, start=1):
        parent = nodes[pick % len(nodes)]
        nodes.append({"id": number, "parent": parent["id"], "depth": parent["depth"] + 1, "score": score})
    rows = dict(page.evaluate("""async (nodes) => {
        const {heights} = await import("/page/tree_layout.js");
        return [...heights(nodes, 0)];
    }""", nodes))
    assert {*rows} == {node["id"] for node in nodes}
    assert rows[0] == 0
    parents = {node["parent"] for node in nodes}
    places = [(node["depth"], rows[node["id"]]) for node in nodes]
    labels = [(node["depth"] + 1, rows[node["id"]]) for node in nodes if node["id"] not in parents]
    assert len({*places, *labels}) == len(places) + len(labels)
    for parent in parents - {-1}:  # a parent stands level with its best child
        children = [node for node in nodes if node["parent"] == parent]
        best = max(child["score"] for child in children)
        assert rows[parent] in {rows[child["id"]] for child in children if child["score"] == best}


@pytest.mark.parametrize("rows", [128, 400, 700], ids=["crowded", "roomy", "tall"])
def test_no_line_and_no_node_crosses_a_label(page: Page, rows: int) -> None:
    """Of what may come, of what became text, and of what was just cut: trees as the strategies give them."""
    page.emulate_media(reduced_motion="reduce")
    labels = [label for seed in range(6) for label in page.evaluate(LABELS, [tree_events(seed), rows])]
    assert [label for label in labels if label[2]] == []
    assert len(labels) > 30


@pytest.mark.parametrize(("requests", "waiting", "asking", "state", "words"), [
    ([], 0, False, "up", "No answer is being made; the tree grows with the next one."),
    ([], 0, True, "up", "An answer waits for its turn."),  # between the two of a race
    ([], 1, False, "up", "An answer waits for its turn."),
    ([], 0, True, "lost", "The boards are not ready; no answer goes on until they are."),
    ([("autoregressive", False)], 0, True, "up", "Plain decoding has no draft tree."),
    ([("pearl", False)], 0, False, "up", "PEARL has no draft tree."),
    ([("autoregressive", False), ("flowspec", True)], 0, False, "up",
     "An answer begins; its tree grows with the first guesses."),
])
def test_what_is_said_in_the_place_of_the_tree(page: Page, requests: list[tuple[str, bool]], waiting: int,
                                               asking: bool, state: str, words: str) -> None:
    assert page.evaluate("""async ([requests, waiting, asking, state]) => {
        const {expectTree, explainTree} = await import("/page/tree.js");
        const {learnTitles} = await import("/page/settings.js");
        learnTitles({titles: {pearl: "PEARL"}});
        expectTree({strategy: "flowspec", tree: true, state});
        explainTree({requests, waiting}, asking);
        return document.querySelector("#tree-idle").textContent;
    }""", [[{"strategy": name, "tree": tree} for name, tree in requests], waiting, asking, state]) == words


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_nothing_moves_when_an_answer_begins_or_ends(browser: Browser, watched: Watchable,
                                                     size: dict[str, int]) -> None:
    with visit(browser, watched.server.url, viewport=size) as page:
        expect(page.locator("#machines li")).to_have_count(1)
        page.fill("#length", str(LONG))
        idle = page.evaluate(PLACES)
        say(page, PROMPT)
        expect(page.locator("#tree")).to_have_attribute("data-grown", re.compile("[1-9]"))
        expect(page.locator("#guesses-of")).to_have_text(re.compile("rounds? of FlowSpec$"))
        expect(page.locator("#tokens_per_second")).to_have_text(re.compile(r"\d"))
        expect(page.locator("#boards li").nth(1)).to_contain_text(re.compile(r"[1-9]\d* rows/s"))
        busy = page.evaluate(PLACES)
        page.click("#stop")
        expect(page.locator(".note")).to_have_text("stopped")
        expect(page.locator("#queue")).to_have_text(re.compile("^0 running"))
        after = page.evaluate(PLACES)
        assert page.locator(".answer").text_content()
        until(lambda: watched.recorder.results[-1].finish_reason != "length")
    assert len(idle) > 100
    for later in (busy, after):
        assert {path: (idle[path], later[path]) for path in idle.keys() & later.keys()
                if idle[path] != later[path]} == {}
    name = {path.split(" > ")[-1]: path for path in (*idle, *busy)}
    assert {*idle} - {*busy} == {name["send"], name["tree-idle"]}
    assert busy[name["stop"]] == idle[name["send"]]


def test_it_asks_for_the_key_once(browser: Browser, cluster: Watched) -> None:
    with (watchable(cluster, api_key="secret") as watched,
          closing(browser.new_context(viewport=DESK)) as opened):
        page = opened.new_page()
        page.set_default_timeout(PATIENCE * 1e3)
        page.goto(watched.server.url)
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-wrong")).to_have_text("That is not the key.")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        await_boards(page)
        page.reload()
        await_boards(page)
        say(page, PROMPT)
        expect(page.locator(".answer")).to_have_text(re.compile("."))
        # Without its server the page says so; the text stays.
        watched.server.admission.close()
        expect(page.locator("#state")).to_have_attribute("data-state", "cut")
        expect(page.locator("#state")).to_contain_text("trying again")
        expect(page.locator("#tree-idle")).to_be_visible()  # of its tree nothing is known any more


def test_a_foreign_page_reaches_nothing_by_a_name_of_its_own(browser: Browser, watched: Watchable) -> None:
    """DNS rebinding: names that a strict parser of URLs cannot read, but that this browser asks for."""
    port = urlsplit(watched.server.url).port
    with closing(browser.new_page()) as page:
        for name in ("evil.example", "a`b.evil.example", "a{b}.evil.example"):
            answer = page.goto(f"http://{name}:{port}/v1/models")
            assert answer is not None
            assert answer.status == 403, name
