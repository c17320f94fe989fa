"""Random and hostile schemas and templates: each is refused, or can be used; nothing hangs, ends or grows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from kits.byte_mutations import FEW
from kits.json_schemas import hostile_schemas, hostile_templates, random_schema
from kits.tiny_models import tiny_tokenizer

from flowspec_edge.errors import UsageError
from flowspec_edge.model.grammar import GrammarCompiler
from flowspec_edge.model.untrusted.processes import TemplateRenderer

VOCABULARY, STOPS = 300, frozenset({0})
STEPS = 12  # tokens of an answer


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tiny_tokenizer(VOCABULARY), VOCABULARY)
    yield made
    made._processes.close()


def used(compiler: GrammarCompiler, schema: object, rng: random.Random) -> bool:
    """Compile a schema, and begin an answer; whether it got so far."""
    assert isinstance(schema, dict)
    try:
        state = compiler.json_schema(schema, STOPS, strict=rng.random() < 0.7).begin()
        for _ in range(STEPS):
            if state.complete:
                break
            state.turn()
            allowed = state.allowed(())
            assert allowed is not None
            choice = rng.choice(np.unpackbits(allowed, bitorder="little").nonzero()[0].tolist())
            if choice in STOPS:
                break
            state.advance(choice)
    except (UsageError, RecursionError):
        return False
    return True


@pytest.mark.parametrize("count", [FEW, pytest.param(100_000, marks=pytest.mark.soak)])
def test_random_schemas(compiler: GrammarCompiler, count: int) -> None:
    rng = random.Random(count)
    good = sum(used(compiler, random_schema(rng), rng) for _ in range(count))
    assert good > count / 4


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.soak)])
def test_hostile_schemas(compiler: GrammarCompiler, count: int) -> None:
    rng = random.Random(count)
    for _, schema in hostile_schemas(count):
        used(compiler, schema, rng)
    assert used(compiler, {"type": "object"}, rng)


@pytest.mark.soak
def test_hostile_templates() -> None:
    renderer = TemplateRenderer()
    refused = 0
    for template in hostile_templates(1000):
        try:
            renderer.render(template, {"bos_token": "<s>"}, [{"role": "user", "content": "hello"}])
        except UsageError:
            refused += 1
    assert refused > 100
    assert renderer.render("{{ messages | length }}", {}, [{}]) == "1"
    renderer.close()
