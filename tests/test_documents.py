"""The documents for readers: guides stay short, and relative links lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
DOCUMENTS = [*sorted(DOCS.parent.glob("*.md")), *sorted(DOCS.rglob("*.md")),
             *sorted((DOCS.parent / "models").rglob("*.md"))]
_CODE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")


def name(path: Path) -> str:
    return str(path.relative_to(DOCS.parent))


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a document's headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)", _CODE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        seen = sum(other == anchor or re.fullmatch(rf"{re.escape(anchor)}-\d+", other) is not None for other in found)
        found.append(f"{anchor}-{seen}" if seen else anchor)
    return set(found)


def broken_links(document: Path) -> list[str]:
    broken = []
    for written in _LINK.findall(_CODE.sub("", document.read_text(encoding="utf-8"))):
        link = written[0] or written[1]
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (document.parent / file).resolve() if file else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    assert not broken_links(document)


def test_a_wrong_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# A `b`-c\n```\n# no heading\n[no link](z.md)\n```\n[x](#a-b-c) [y](#no-heading) [z](z.md) "
                        "[w](https://example.org/z.md)\n")
    assert broken_links(document) == ["#no-heading", "z.md"]


@pytest.mark.parametrize("guide", GUIDES, ids=name)
def test_guides_are_short(guide: Path) -> None:
    assert len(guide.read_text(encoding="utf-8").splitlines()) < 150
