"""Pictures of the page in both colour schemes, on a desk and on a phone: idle, during an answer, after a
race, while a stage is lost, and after that.

    python tests/e2e/page_pictures.py build/pictures        (needs chromium)

``docs/page.png`` is desk-light.png, ``docs/page-dark.png`` desk-dark.png, both quantised to 128 colours.
The cluster is five processes on this machine at the pace of a profile; a busy machine's figures are too low.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
PICTURES = {f"{name}-{scheme}": {"viewport": size, "color_scheme": scheme}
            for name, size in (("desk", DESK), ("phone", PHONE)) for scheme in ("light", "dark")}
BEFORE, PROMPT = "import os\n\ndef walk(path):", "class Stack:"
RACED = 32  # tokens: the profile's plain decoding makes three a second
# Of "… 34 guesses on D0, 21 in the pipeline, …", which a screen reader says of the tree
BUSHY = """() => {
    const told = document.querySelector("#tree").getAttribute("aria-label");
    const [drafted, sent] = told.match(/\\d+ (?=guesses|in the)/g) ?? [];
    return Number(drafted) > 9 && Number(sent) > 9;
}"""
PATIENCE_MS = 120e3


@contextmanager
def service() -> Iterator[tuple[str, int]]:
    """Yield the page's address, and the server's process id."""
    command = [sys.executable, "-m", "flowspec_edge", "serve", "--emulate", "paper-7b", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            url = next(found[1] for line in lines if (found := re.search(r"the page at (\S+)", line)))
            yield url, process.pid
        finally:
            process.send_signal(signal.SIGTERM)


def ask(page: Page, prompt: str) -> None:
    expect(page.locator("#stop")).to_be_hidden()
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    expect(page.locator("#stop")).to_be_visible()


def answers(page: Page, out: Path) -> None:
    """One answer, then a picture in the middle of the next."""
    for prompt in (BEFORE, PROMPT):
        ask(page, prompt)
        expect(page.locator(".answer").last).to_contain_text(re.compile(r"(\S+\s+){12}"))
        if prompt == BEFORE:
            page.click("#stop")
            page.wait_for_timeout(1000)  # a session at once after another gets a colour of its own
    page.wait_for_function(BUSHY)
    page.screenshot(path=out, full_page=True)
    page.click("#stop")


def race(page: Page, out: Path) -> None:
    page.click("#new-chat")
    page.fill("#length", str(RACED))
    page.locator("label.switch").click()
    ask(page, BEFORE)
    expect(page.locator(".verdict")).to_contain_text("identical")
    page.wait_for_timeout(1000)  # the bars grow
    page.screenshot(path=out, full_page=True)


def loss(page: Page, server: int, lost: Path, after: Path) -> None:
    """Kill a stage in the middle of an answer."""
    page.fill("#length", str(RACED))
    ask(page, PROMPT)
    expect(page.locator(".answer")).to_contain_text(re.compile(r"(\S+\s+){3}"))
    os.kill(stages(server)[2], signal.SIGKILL)
    expect(page.locator("#boards li[data-lost]")).to_be_visible()
    page.screenshot(path=lost, full_page=True)
    expect(page.locator("#stop")).to_be_hidden()
    page.wait_for_timeout(4000)  # whatever moves has moved
    page.screenshot(path=after, full_page=True)


def stages(server: int) -> list[int]:
    """The process ids of its stages, which its fork server made."""
    def children(pid: int) -> list[int]:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())]

    forks = next(pid for pid in children(server)
                 if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return children(forks)


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=PATIENCE_MS)
    with service() as (url, server), sync_playwright() as playwright, closing(
            playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])) as browser:
        for name in [*PICTURES, "desk-light-loss", "phone-light-loss"]:  # losses are remembered: the last
            settings = PICTURES[name.removesuffix("-loss")]
            with closing(browser.new_context(**settings)) as context:  # type: ignore[arg-type]
                context.set_default_timeout(PATIENCE_MS)
                page = context.new_page()
                page.goto(url)
                expect(page.locator("#boards li")).to_have_count(5)
                if name in PICTURES:
                    page.screenshot(path=directory / f"{name}-idle.png", full_page=True)
                    answers(page, directory / f"{name}.png")
                    race(page, directory / f"{name}-race.png")
                else:
                    loss(page, server, directory / f"{name}-begins.png", directory / f"{name}-is-over.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
