"""What the tests of the page in a real browser share: how it is opened, and what it must never do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

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


@dataclass
class Visit:
    """The page, and what it must not do."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def asked(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)


@contextmanager
def visit(browser: Browser, url: str, **context: object) -> Iterator[Visit]:
    """The page at ``url``, loaded; in the end it has neither complained nor asked anybody else."""
    opened = browser.new_context(**{"viewport": DESK, **context})  # type: ignore[arg-type]
    opened.set_default_timeout(PATIENCE * 1e3)
    with closing(opened):
        found = Visit(opened.new_page())
        found.page.on("console", found.heard)
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.on("request", found.asked)
        found.page.goto(url)
        yield found
        assert found.complaints == []
        assert found.hosts == {urlsplit(url).netloc}


@contextmanager
def loaded(browser: Browser, cluster: Watched) -> Iterator[Page]:
    """The page, to run its modules in; its server has gone, for one at a time drives the cluster."""
    with closing(browser.new_context(viewport=DESK)) as opened:
        page = opened.new_page()
        with watchable(cluster) as watched:
            page.goto(watched.server.url)
            board_names(page)
        yield page


def board_names(page: Page) -> list[str]:
    expect(page.locator("#boards li")).to_have_count(STAGES + 1)
    return [text.split()[0][:2] for text in page.locator("#boards h3").all_inner_texts()]


def scrolls_sideways(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


def painted(page: Page, canvas: str) -> bool:
    """Whether anything is drawn on it."""
    return bool(page.evaluate("""(id) => {
        const canvas = document.querySelector(id);
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.some((value) => value > 0);
    }""", canvas))
