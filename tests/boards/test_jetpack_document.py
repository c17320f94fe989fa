"""The table of JetPack releases in docs/reference/jetpack.md is that of profiles/jetson/jetpacks.toml.

FLOWSPEC_UPDATE_DOCS=1 puts the data into the document.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from flowspec_edge.util.jetson import JetPack, is_from, jetpack_of, jetpacks, shared_library_of, system

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = DOCS / "reference" / "jetpack.md"
GUIDE = DOCS / "guides" / "boards.md"
TABLE = re.compile(r"(?<=<!-- jetpacks -->\n).*?(?=<!-- end of jetpacks -->)", re.DOTALL)
LARGE_PIECES = "#large-pieces-of-memory"
HEAD = ("| JetPack | L4T | CUDA | Python | how to get torch |", "|---|---|---|---|---|")


def releases(known: JetPack) -> str:
    """Which of them may refuse large pieces of memory."""
    since, shown = system().large_pieces.since, f"{known.l4t}x"
    if known.supported and since.startswith(known.l4t):
        return f"{shown} (from {since} on [large pieces]({LARGE_PIECES}))"
    return f"{shown} ([large pieces]({LARGE_PIECES}))" if is_from(known.l4t, since) else shown


def row(known: JetPack) -> str:
    return f"| {known.name} | {releases(known)} | {known.cuda} | {known.python} | `{known.install()}` |"


def test_the_table_of_jetpacks_is_the_data() -> None:
    text = DOCUMENT.read_text()
    table = "".join(f"{line}\n" for line in (*HEAD, *(row(known) for known in jetpacks() if known.supported)))
    if os.environ.get("FLOWSPEC_UPDATE_DOCS"):
        DOCUMENT.write_text(TABLE.sub(lambda _: table, text))
    else:
        assert TABLE.findall(text) == [table]


def test_the_releases_that_are_not_supported_are_named() -> None:
    *_, after = DOCUMENT.read_text().partition("<!-- end of jetpacks -->")
    others = " ".join(after.split("\n## ")[0].split())
    assert all(re.search(rf"\b{re.escape(known.name.partition('.0 (')[0])}\b", others) for known in jetpacks()
               if not known.supported)
    assert all(known.reason.partition(" ")[2] in others for known in jetpacks() if not known.supported)


def test_torch_and_its_libraries_are_installed_as_the_data_say() -> None:
    """Those of JetPack 6.2; a block in the guide has a command a line."""
    text, known = GUIDE.read_text(), jetpack_of("36.4.3")
    assert known
    assert f"\n{known.install()}\n" in text
    for file in ("libcudss.so.0", "libopenblas.so.0"):
        library = shared_library_of("36.4.3", file)
        assert library
        *_, last = library.install.split(" && ")
        assert last.split()[-1] in text
        assert all(command in text for command in library.install.split(" && ")[:-1])
