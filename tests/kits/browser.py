"""What the tests of the page in a real browser share: how it is opened, and what it must never do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from kits import network_beds
from kits.process_clusters import PATIENCE
from kits.watched_server import STAGES, Watched, watchable

CHROMIUM = Path("/usr/bin/chromium")
# Nothing of the browser's own goes to the network: a request to another host would be the page's.
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update",
         "--host-resolver-rules=MAP *.example 127.0.0.1")  # as a foreign page's name may resolve
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}

expect.set_options(timeout=PATIENCE * 1e3)  # of a busy machine

# A browser is too much to ask of everybody who runs the tests.
needs_browser = network_beds.needs("a real browser", "" if CHROMIUM.exists() else
                               f"there is no {CHROMIUM} (Debian package chromium)")


@contextmanager
def visit(browser: Browser, url: str, **context: object) -> Iterator[Page]:
    """The page at ``url``, once it shows the boards; in the end it has neither complained nor asked anybody else."""
    opened = browser.new_context(**{"viewport": DESK, **context})  # type: ignore[arg-type]
    opened.set_default_timeout(PATIENCE * 1e3)
    complaints, hosts = list[str](), set[str]()

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    with closing(opened):
        page = opened.new_page()
        page.on("console", hear)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page.goto(url)
        await_boards(page)
        yield page
        assert complaints == []
        assert hosts == {urlsplit(url).netloc}


@contextmanager
def loaded(browser: Browser, cluster: Watched) -> Iterator[Page]:
    """The page, to run its modules in; its server has gone, for one at a time drives the cluster."""
    with closing(browser.new_context(viewport=DESK)) as opened:
        page = opened.new_page()
        with watchable(cluster) as watched:
            page.goto(watched.server.url)
            await_boards(page)
        yield page


def await_boards(page: Page) -> None:
    """D0 and every stage."""
    expect(page.locator("#boards li")).to_have_count(STAGES + 1)
    names = [text.split()[0][:2] for text in page.locator("#boards h3").all_inner_texts()]
    assert names == ["D0", *(f"V{stage}" for stage in range(1, STAGES + 1))]


def say(page: Page, prompt: str, length: int | None = None) -> None:
    """Ask for an answer, of so many tokens at most."""
    if length is not None:
        page.fill("#length", str(length))
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def scrolls_sideways(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


def painted(page: Page, canvas: str) -> bool:
    """Whether anything is drawn on it."""
    return bool(page.evaluate("""(id) => {
        const canvas = document.querySelector(id);
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.some((value) => value > 0);
    }""", canvas))
