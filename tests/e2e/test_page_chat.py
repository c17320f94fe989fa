"""The page's chat box in a real browser: settings, the race of two strategies, Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kits.browser import PHONE, loaded, needs_browser, say, scrolls_sideways, visit
from kits.hypothesis_examples import examples
from kits.process_clusters import until
from kits.requests import continued
from kits.tiny_model_dir import never_ends, tiny_model_dir
from kits.watched_server import Watchable, Watched, watchable, watched_cluster
from playwright.sync_api import Browser, Page, Request, Route, expect

from flowspec_edge.model.opened import OpenModel
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.serving.dashboard.stats import RequestStats

PROMPT = "def f(x): return"
TOKENS = 24
HOSTILE = (
    "<img src=x onerror='document.title=1'>", "<script>document.title=1</script>", "**<b onclick=x>b</b>**",
    "[link](javascript:document.title=1)", "![i](http://elsewhere.example/x.png)",
    "```\n</code></pre><script>x</script>\n```",
    "``` <img src=x onerror=x>\n<svg onload=x>\n```", "# <iframe src=javascript:x></iframe>",
    "- <a href='javascript:x'>a</a>\n  1. <style>*{display:none}</style>", "`<img src=x onerror=x>`",
    "&lt;script&gt; &amp; &#60;b&#62;", "<!-- -->", "\u202e\u0000\ufeff", "***a**b*c_d_e__f__`g``h`",
    "*" * 3000, "`" * 3001 + "a", "_a " * 3000, "*a **b " * 2000, "[" * 5000, "> " * 3000,
    "\n".join(" " * 2 * depth + "- x" for depth in range(500)), "99999999999. x\n999999999. y",
)
ELEMENTS = {"P", "H3", "H4", "H5", "H6", "UL", "OL", "LI", "STRONG", "EM", "CODE", "PRE"}
# Of each text: its elements, their attributes, how many levels they have, and its words
RENDERED = """async (texts) => {
    const {markdown} = await import("/page/markdown.js");
    const depth = (node) => 1 + Math.max(0, ...[...node.childNodes].map(depth));
    return texts.map((text) => {
        const whole = markdown(text), elements = [...whole.querySelectorAll("*")];
        return [elements.map(({tagName}) => tagName), elements.flatMap((one) => [...one.attributes].map(
            ({name, value}) => `${name}=${value}`)), depth(whole), whole.textContent];
    });
}"""

# Keep what is said in the place of the tree while it can be seen and an answer is on its way.
SAID = """() => {
    const idle = document.querySelector("#tree-idle"), log = document.querySelector("#log");
    window.said = [];
    new MutationObserver(() => {
        if (log.ariaBusy === "true" && idle.checkVisibility()) said.push(idle.textContent);
    }).observe(idle, {childList: true, characterData: true, subtree: true, attributes: true});
}"""

pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), layers=2, hidden=32, vocab=97)
    return never_ends(path, sampled=True)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Watched]:
    with watched_cluster(model) as found:
        yield found


@pytest.fixture
def watched(cluster: Watched) -> Iterator[Watchable]:
    with watchable(cluster) as found:
        yield found


@pytest.fixture(scope="module")
def page(browser: Browser, cluster: Watched) -> Iterator[Page]:
    with loaded(browser, cluster) as page:
        yield page


class Bodies(list[dict[str, Any]]):
    """What the page asks for; ``before``: what it says of each lane of a race at that time."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self.before: list[list[str]] = []
        page.route("**/v1/**", self._asked)

    def _asked(self, route: Route, request: Request) -> None:
        self.append(json.loads(request.post_data or ""))
        self.before.append(request.frame.page.locator(".lane .note").all_inner_texts())
        route.continue_()


def ask(page: Page, prompt: str = PROMPT) -> None:
    say(page, prompt)
    expect(page.locator(".turn").last).to_be_visible()
    expect(page.locator("#stop")).to_be_hidden()


def test_settings_reach_the_request(browser: Browser, watched: Watchable) -> None:
    with visit(browser, watched.server.url) as page:
        bodies = Bodies(page)
        assert page.locator("#strategy option").all_inner_texts() == ["FlowSpec", "Chunk-PP", "plain"]
        expect(page.locator("#served")).to_have_text(re.compile(", FlowSpec$"))
        assert "_" not in page.locator("body").inner_text()  # of the code's names
        ask(page)
        assert bodies[-1] == {"stream": True, "stream_options": {"include_usage": True}, "model": "tiny",
                              "prompt": PROMPT, "max_tokens": 256, "flowspec": {"strategy": "flowspec"}}
        page.select_option("#strategy", "chunk_pp")
        page.fill("#temperature", "0.05")  # the model's answers end by themselves at high ones
        page.fill("#length", "33")
        ask(page)
        assert bodies[-1].items() >= {"max_tokens": 33, "temperature": 0.05,
                                      "flowspec": {"strategy": "chunk_pp"}}.items()
        until(lambda: watched.server.records.seen[-1].strategy == "chunk_pp")
        assert len(watched.recorder.results[-1].tokens) == 33
        page.fill("#length", "")
        ask(page)
        assert "max_tokens" not in bodies[-1]
        asked = len(bodies)
        for name, wrong in (("temperature", "5"), ("length", "0")):
            page.fill(f"#{name}", wrong)
            say(page, PROMPT)
            assert page.evaluate("() => document.querySelector(':invalid:focus').id") == name
            page.fill(f"#{name}", "")
        assert len(bodies) == asked


@pytest.mark.parametrize("temperature", ["", "0", "0.8"])
def test_a_race_has_both_speeds_and_the_same_text_twice(browser: Browser, watched: Watchable, model: Path,
                                                        temperature: str) -> None:
    with visit(browser, watched.server.url, viewport=PHONE) as page:
        bodies = Bodies(page)
        expect(page.locator("label.switch")).to_have_text("race plain / FlowSpec")
        page.locator("label.switch").click()
        page.fill("#length", str(TOKENS))
        page.fill("#temperature", temperature)
        page.evaluate(SAID)
        ask(page)
        plain, other = bodies
        assert [body["flowspec"] for body in bodies] == [{"strategy": name, "tokens": True}
                                                         for name in ("autoregressive", "flowspec")]
        assert {**plain, "flowspec": None} == {**other, "flowspec": None}  # the seed, too
        assert bodies.before[0] == ["", ""]
        assert "a second" in bodies.before[1][0]  # one after the other
        assert page.locator(".lane b").all_inner_texts() == ["plain", "FlowSpec"]
        for lane in (0, 1):
            expect(page.locator(".lane .note").nth(lane)).to_have_text(
                re.compile(rf"^{TOKENS} tokens, \d+\.\d a second$"))
        verdict = page.locator(".verdict")
        expect(verdict).to_have_attribute("data-same", "true")
        expect(verdict).to_have_text(re.compile(rf"FlowSpec has \d+\.\d\d times the speed of plain.*"
                                                rf"at temperature {temperature or 0}\b.*\b{TOKENS}\b"))
        sampling = Sampling(temperature=float(temperature or 0), seed=plain["seed"])
        _, expected = continued(OpenModel(model), PROMPT, TOKENS, sampling)
        assert [answer.text_content() for answer in page.locator(".answer").all()] == [expected] * 2
        assert not scrolls_sideways(page)
        page.select_option("#strategy", "chunk_pp")
        expect(page.locator("#contender")).to_have_text("Chunk-PP")
        said = page.evaluate("said")
        assert said
        assert not [words for words in said if words.startswith("No answer is being made")]


def test_a_race_says_from_which_token_on_texts_differ(browser: Browser, watched: Watchable) -> None:
    """A fault of the server: it takes the second racer's seed and temperature for others."""
    def lies(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        if body["flowspec"]["strategy"] != "autoregressive":
            body |= {"temperature": 2, "seed": body["seed"] + 1}
        route.continue_(post_data=json.dumps(body))

    with visit(browser, watched.server.url) as page:
        page.route("**/v1/completions", lies)
        page.locator("label.switch").click()
        page.fill("#length", str(TOKENS))
        ask(page)
        verdict = page.locator(".verdict")
        expect(verdict).to_have_attribute("data-same", "false")
        expect(verdict).to_have_text(re.compile(r"differ .*from token \d+ on"))


def test_a_race_that_is_stopped_has_no_winner(browser: Browser, watched: Watchable) -> None:
    with visit(browser, watched.server.url) as page:
        bodies = Bodies(page)
        page.locator("label.switch").click()
        say(page, PROMPT, 1500)
        expect(page.locator(".answer").first).to_have_text(re.compile("."))
        idle = page.locator("#tree-idle")
        expect(idle).to_be_visible()
        expect(idle).to_have_text("Plain decoding has no draft tree.")
        page.click("#stop")
        expect(page.locator(".lane .note").first).to_have_text("stopped")
        expect(idle).to_have_text("No answer is being made; the tree grows with the next one.")
        expect(page.locator("#send")).to_be_visible()
        assert page.locator(".verdict").text_content() == ""
        assert len(bodies) == 1


def test_right_guesses_are_those_of_one_strategy(browser: Browser, watched: Watchable,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched.feed, "stats", RequestStats())
    rounds, accepted = {"flowspec": 0, "chunk_pp": 0}, {"flowspec": 0, "chunk_pp": 0}
    with visit(browser, watched.server.url) as page:
        whose, bars = page.locator("#guesses-of"), page.locator("#acceptance")
        expect(whose).to_have_text("no round has ended yet")
        page.fill("#length", str(TOKENS))
        for strategy, title in (("flowspec", "FlowSpec"), ("chunk_pp", "Chunk-PP"), ("flowspec", "FlowSpec")):
            page.select_option("#strategy", strategy)
            ask(page)
            stats = watched.recorder.results[-1].stats
            rounds[strategy] += stats.rounds
            accepted[strategy] += stats.accepted
            words = f"the last {rounds[strategy]} rounds of {title}"
            expect(whose).to_have_text(words)
            expect(bars).to_have_attribute("aria-label", re.compile(f"{words}, "))
            shares = bars.locator("span").evaluate_all(
                "(all) => all.map((bar) => Number(bar.style.getPropertyValue('--share')))")
            assert sum(shares) * rounds[strategy] == pytest.approx(accepted[strategy])
            page.select_option("#strategy", "autoregressive")  # which guesses nothing
            ask(page)
            expect(page.locator("#queue")).to_have_text(re.compile("^0 running"))
            expect(whose).to_have_text(words)


def test_a_new_chat_forgets_the_one_before(browser: Browser, cluster: Watched) -> None:
    with (watchable(cluster, template="vicuna") as watched,
          visit(browser, watched.server.url) as page):
        bodies = Bodies(page)
        page.fill("#length", "8")
        expect(page.locator("#new-chat")).to_be_hidden()
        for turns in (1, 3):
            ask(page, "hello")
            assert len(bodies[-1]["messages"]) == turns
        page.click("#new-chat")
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.locator("#hint")).to_be_visible()
        ask(page, "hello")
        assert bodies[-1]["messages"] == [{"role": "user", "content": "hello"}]


def test_an_answer_in_markdown_is_shown_as_such_and_no_more(browser: Browser, cluster: Watched) -> None:
    """The words of a model that knows Markdown, and of one that means ill."""
    text = "# Title\n\nSome **bold**, *italic*, `code`:\n\n```js\nlet x = 1;\n```\n- one\n- two\n  1. three"
    told = "\n\n".join([text, *HOSTILE[:11]])

    def answer(route: Route) -> None:
        chunks = [{"choices": [{"delta": {"content": told[i:i + 7]}}]} for i in range(0, len(told), 7)]
        chunks.append({"choices": [], "usage": {"completion_tokens": 9},
                       "flowspec": {"tokens_per_second": 2}})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    with (watchable(cluster, template="vicuna") as watched,
          visit(browser, watched.server.url) as page):  # which heard no complaint of the browser
        page.route("**/v1/chat/completions", answer)
        ask(page)
        shown = page.locator(".answer")
        for kind, words in (("h3", "Title"), ("strong", "bold"), ("em", "italic"), ("p > code", "code"),
                            ("pre > code", "let x = 1;"), ("ol > li", "three")):
            expect(shown.locator(kind).first).to_have_text(words)
        assert shown.locator("li").count() == 5  # two of them hostile
        assert {name.upper() for name in shown.locator("*").evaluate_all(
            "(all) => all.map((one) => one.tagName)")} <= ELEMENTS
        assert page.title() == "FlowSpec"
        for words in HOSTILE[:4]:
            assert words.replace("*", "") in (shown.text_content() or "").replace("*", "")


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: re.sub(r"\W+", "_", text[:24]))
def test_hostile_markdown_is_text(page: Page, text: str) -> None:
    [[elements, attributes, depth, shown]] = page.evaluate(RENDERED, [text])
    assert {*elements} <= ELEMENTS
    assert all(re.fullmatch(r"start=\d+", attribute) for attribute in attributes)
    assert depth < 40
    assert "<" not in text or "<" in shown


LINES = st.one_of(st.just("```"), st.text("ab<>&\"'=*_`#-+1.) \t", max_size=24).filter(
    lambda line: "```" not in line))


@examples(200, 25)
@given(st.lists(st.lists(LINES, max_size=12).map("\n".join), min_size=20, max_size=20))
@example(["a\n- b\n\n  c\n1. d\n- e\n# f\n```\n# g"] * 20)
def test_markdown_loses_and_invents_no_word(page: Page, texts: list[str]) -> None:
    for text, (elements, attributes, _, shown) in zip(texts, page.evaluate(RENDERED, texts), strict=True):
        assert {*elements} <= ELEMENTS
        assert all(re.fullmatch(r"start=\d+", attribute) for attribute in attributes)
        assert re.sub(r"[^ab<>&\"'=]", "", shown) == re.sub(r"[^ab<>&\"'=]", "", text)
