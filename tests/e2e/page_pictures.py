"""Pictures of the page during an answer, in both colour schemes, and on a phone.

    python tests/e2e/page_pictures.py build/pictures        (needs chromium)

``docs/page.png`` is desk-light.png, ``docs/page-dark.png`` desk-dark.png, both quantised to 128 colours.
The cluster is five processes on this machine at the pace of a profile; a busy machine's figures are too low.
"""

from __future__ import annotations

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
# Of "… 34 guesses on D0, 21 in the pipeline, …", which a screen reader says of the tree
BUSHY = """() => {
    const told = document.querySelector("#tree").getAttribute("aria-label");
    const [drafted, sent] = told.match(/\\d+ (?=guesses|in the)/g) ?? [];
    return Number(drafted) > 9 && Number(sent) > 9;
}"""
PATIENCE_MS = 120e3


@contextmanager
def service() -> Iterator[str]:
    """Yield the page's address."""
    command = [sys.executable, "-m", "flowspec_edge", "serve", "--emulate", "paper-7b", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            yield next(found[1] for line in lines if (found := re.search(r"the page at (\S+)", line)))
        finally:
            process.send_signal(signal.SIGTERM)


def picture(page: Page, out: Path) -> None:
    """One answer to its end, then a picture in the middle of the next."""
    for prompt in (BEFORE, PROMPT):
        expect(page.locator("#stop")).to_be_hidden()
        page.fill("#prompt", prompt)
        page.press("#prompt", "Enter")
        expect(page.locator("#stop")).to_be_visible()
        expect(page.locator(".answer").last).to_contain_text(re.compile(r"(\S+\s+){12}"))
        if prompt == BEFORE:
            page.click("#stop")
            page.wait_for_timeout(1000)  # a session at once after another gets a colour of its own
    page.wait_for_function(BUSHY)
    page.screenshot(path=out, full_page=True)
    page.click("#stop")


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with service() as url, sync_playwright() as playwright, closing(
            playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])) as browser:
        for name, settings in PICTURES.items():
            with closing(browser.new_context(**settings)) as context:  # type: ignore[arg-type]
                context.set_default_timeout(PATIENCE_MS)
                expect.set_options(timeout=PATIENCE_MS)
                page = context.new_page()
                page.goto(url)
                picture(page, directory / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
