"""Open prompts for a small chat model, to train a draft head on the answers: kinds of task times subjects.

``prompts(seed)`` yields them in a shuffled order without end. The same seed gives the same prompts. A
passage to summarise or to extract from is a text that the model itself wrote, so these prompts come in two
turns: the first asks for the passage, the second works on it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from flowspec_edge.util.tomlfile import load_toml


class Parts(BaseModel):
    """What prompts are made of; the fields are those of open_prompts.toml."""

    chat: list[str]
    questions: list[str]
    code: list[str]
    sums: list[str]
    passage: list[str]
    on_passage: list[str]
    subjects: list[str]
    code_tasks: list[str]
    things: list[str]
    places: list[str]


def prompts(seed: int) -> Iterator[list[str]]:
    """Yield the user's turns of one chat after another, in the shares of a mixed use."""
    parts = load_toml(Path(__file__).with_suffix(".toml"), Parts)
    draw = random.Random(seed)
    while True:
        subject, kind = draw.choice(parts.subjects), draw.random()
        if kind < 0.42:
            yield [draw.choice(parts.chat).format(s=subject)]
        elif kind < 0.52:
            yield [draw.choice(parts.questions).format(s=subject)]
        elif kind < 0.68:
            yield [draw.choice(parts.code).format(t=draw.choice(parts.code_tasks))]
        elif kind < 0.82:
            text = draw.choice(parts.sums).format(
                p=draw.choice(parts.places), x=draw.choice(parts.things), a=draw.randint(2, 30),
                b=draw.randint(2, 12), c=draw.randint(2, 9), d=draw.randint(400, 999))
            yield [text[0].upper() + text[1:]]
        else:
            yield [draw.choice(parts.passage).format(s=subject), draw.choice(parts.on_passage)]
