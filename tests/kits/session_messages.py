"""What D0 sends in one session, drawn by hypothesis: text, tree segments, commits, misses, prunes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from flowspec_edge.messages import Prune, Segment
from kits.stages import Book, random_tokens

VOCAB = 97


@dataclass
class Story:
    """What D0 sent, and what must be left of it."""

    book: Book = field(default_factory=Book)
    segments: list[Segment] = field(default_factory=list)
    prunes: list[Prune] = field(default_factory=list)

    @property
    def survivors(self) -> list[int]:
        """What the last segment and the last prune leave: the committed and the live numbers."""
        return sorted({*self.book.committed, *self.book.live()})


@st.composite
def stories(draw: st.DrawFn, session: int = 1, kept: tuple[int, ...] = (), text: tuple[int, ...] = ()
            ) -> Story:
    """A prompt in up to two chunks, after the tokens that were ``kept`` or after ``text``, then some rounds
    of growing, committing, missing, pruning."""
    story = Story(Book(session, kept=kept))
    book = story.book
    tokens = iter(random_tokens(200, VOCAB, seed=draw(st.integers(0, 3))))

    def fresh(parent: int) -> int:
        """The next token that no child of ``parent`` has: as in a tree, a path stands for one number."""
        return next(token for token in tokens if (*book.paths[parent], token) not in book.paths.values())

    if text:
        story.segments.append(book.text(text))
    for size in draw(st.sampled_from([[5], [3, 2], [1, 4]])):
        story.segments.append(book.text([next(tokens) for _ in range(size)]))
    book.builder.skip_prune()
    for _ in range(draw(st.integers(1, 6))):
        act = draw(st.sampled_from(["grow", "grow", "commit", "miss", "prune"]))
        root = book.committed[-1]
        alive = sorted(book.live())
        children = [n for n in alive if len(book.paths[n]) == len(book.paths[root]) + 1]
        if act == "grow":
            for choice in draw(st.lists(st.integers(0, 30), max_size=5)):
                parents = [root, *sorted(book.live())]
                parent = parents[choice % len(parents)]
                book.add(fresh(parent), parent)
            story.segments.append(book.builder.seal())
        elif act == "commit" and children:
            book.commit(draw(st.sampled_from(children)))
            story.prunes.append(book.prune())
        elif act == "miss":
            book.add(fresh(root), root, committed=True)
            story.segments.append(book.builder.seal())
            story.prunes.append(book.prune())
        elif act == "prune" and alive:  # D0 gives up a subtree without a commit
            given_up = book.paths[draw(st.sampled_from(alive))]
            book.given_up |= {n for n in alive if book.paths[n][: len(given_up)] == given_up}
            story.prunes.append(book.prune())
    story.segments.append(book.builder.seal())  # empty; brings the last commits
    story.prunes.append(book.prune())
    return story
