"""The recipes of the demonstration model: everything that determines its weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from demo_lm import LMRecipe
from demo_unlikelihood import UnlikelihoodRecipe

from flowspec_edge.lab.training.eagle import EagleRecipe
from flowspec_edge.lab.training.loop import QUICK as QUICK_LOOP
from flowspec_edge.lab.training.loop import LoopOptions
from flowspec_edge.lab.training.python_source import QUICK_CHARACTERS


@dataclass(frozen=True)
class DemoRecipe:
    """The recipe of the whole demonstration model; ``corpus_limit``: characters of training text; None: all."""

    name: str
    vocabulary: int
    seed: int
    target: LMRecipe
    unlikelihood: UnlikelihoodRecipe  # of the target, after its training
    eagle: EagleRecipe
    draft_lm: LMRecipe
    corpus_limit: int | None = None
    loop: LoopOptions = field(default_factory=LoopOptions, compare=False)


DEMO = DemoRecipe(
    name="demo",
    vocabulary=4096,
    seed=0,
    target=LMRecipe(width=192, layers=8, heads=6, kv_heads=2, intermediate=512, steps=980),
    unlikelihood=UnlikelihoodRecipe(steps=480),
    eagle=EagleRecipe(steps=900),
    draft_lm=LMRecipe(width=96, layers=2, heads=3, kv_heads=1, intermediate=256, steps=250, window=256),
)

QUICK = DemoRecipe(
    name="quick",
    vocabulary=320,
    seed=0,
    target=LMRecipe(width=32, layers=2, heads=2, kv_heads=1, intermediate=64, steps=75, window=64,
                    tokens_per_step=512, micro_batch=256),
    unlikelihood=UnlikelihoodRecipe(steps=10, texts=4, prompt=8, length=48, window=64, tokens_per_step=512,
                                    micro_batch=256),
    eagle=EagleRecipe(steps=75, window=64, tokens_per_step=256, micro_batch=128, chains=16),
    draft_lm=LMRecipe(width=16, layers=1, heads=1, kv_heads=1, intermediate=32, steps=50, window=64,
                      tokens_per_step=512, micro_batch=256),
    corpus_limit=QUICK_CHARACTERS,
    loop=QUICK_LOOP,
)
