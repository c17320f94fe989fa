"""The recipes: everything that decides what the trained weights are.

Knows sizes, steps and seeds; a run directory is bound to one recipe.  Does not know how to train.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flowspec_edge.training.eagle import EagleRecipe
from flowspec_edge.training.eagle3 import Eagle3Recipe
from flowspec_edge.training.heads import HeadRecipe
from flowspec_edge.training.loop import Pace
from flowspec_edge.training.spd import SpdRecipe
from flowspec_edge.training.target import LMRecipe


@dataclass(frozen=True)
class DemoRecipe:
    """The whole of a demonstration model."""

    name: str
    vocabulary: int
    seed: int
    target: LMRecipe
    eagle: EagleRecipe
    draft_lm: LMRecipe
    corpus_limit: int | None = None  # characters of training text; None is all there is
    pace: Pace = field(default_factory=Pace, compare=False)


DEMO = DemoRecipe(
    name="demo",
    vocabulary=4096,
    seed=0,
    target=LMRecipe(width=192, layers=8, heads=6, kv_heads=2, intermediate=512, steps=980),
    eagle=EagleRecipe(steps=900),
    draft_lm=LMRecipe(width=96, layers=2, heads=3, kv_heads=1, intermediate=256, steps=250, window=256),
)

QUICK = DemoRecipe(
    name="quick",
    vocabulary=320,
    seed=0,
    target=LMRecipe(width=32, layers=2, heads=2, kv_heads=1, intermediate=64, steps=75, window=64,
                    tokens_per_step=512, micro_batch=256),
    eagle=EagleRecipe(steps=75, window=64, tokens_per_step=256, micro_batch=128, chains=16),
    draft_lm=LMRecipe(width=16, layers=1, heads=1, kv_heads=1, intermediate=32, steps=50, window=64,
                      tokens_per_step=512, micro_batch=256),
    corpus_limit=400_000,
    pace=Pace(checkpoint_every_s=0.2, compile=False),
)

SPD = SpdRecipe(steps=600)
SPD_QUICK = SpdRecipe(steps=60, window=64, tokens_per_step=256, micro_batch=128)

# Heads for any target, by kind.  As many steps as the demonstration's; a large target wants more.
HEADS: dict[str, HeadRecipe] = {"eagle2": EagleRecipe(steps=900), "eagle3": Eagle3Recipe(steps=900)}
HEADS_QUICK: dict[str, HeadRecipe] = {
    "eagle2": EagleRecipe(steps=60, window=64, tokens_per_step=256, micro_batch=128, chains=16),
    "eagle3": Eagle3Recipe(steps=60, window=64, tokens_per_step=256, micro_batch=128, chains=16),
}


def going_on(recipe: HeadRecipe) -> HeadRecipe:
    """For a head that is trained already: unrolled from the first step on, and the learning rate falls
    from a fifth of the run on."""
    return replace(recipe, plain=0.0, decay_from=0.2)
