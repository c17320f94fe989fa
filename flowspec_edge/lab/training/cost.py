"""What training a draft head costs on this machine: the time of a step, and memory.

The floating-point operations of the real step are counted.  A step that fits into the memory and into some
seconds is timed on the training's own device, and its rate is applied to the real one: the real step itself
if it fits, else one of fewer windows, fewer layers, or less width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from flowspec_edge.lab.training.eagle import Eagle2, EagleRecipe
from flowspec_edge.lab.training.heads import HeadRecipe, UnrolledStudent, optimiser_for, trainer_of
from flowspec_edge.lab.training.loop import backpropagate, device

_SECONDS = 12.0  # wanted of the timed step
_MEMORY_SHARE = 0.5  # of what is free, for the timed step
_LAYERS = 4  # of a shortened target: EAGLE-3 reads states of three different depths
_PROBE = 1024  # width of the product that gives a first guess of the rate


@dataclass(frozen=True)
class TrainingCost:
    """What training by ``recipe`` takes on ``device``.

    step_s     seconds of a step, the mean of plain and unrolled ones, without torch.compile
    timed      the step that was timed; exact: whether it was the real one
    timed_s    its seconds
    memory     bytes that the training needs; free: those that are available
    """

    device: str
    recipe: HeadRecipe
    step_s: float
    timed: str
    exact: bool
    timed_s: float
    memory: int
    free: int

    @property
    def hours(self) -> float:
        return self.step_s * self.recipe.steps / 3600

    @property
    def tokens(self) -> int:
        return self.recipe.steps * self.recipe.tokens_per_step

    @property
    def fits(self) -> bool:
        return self.memory <= self.free


@dataclass(frozen=True)
class _Step:
    """A step of training: the target's configuration and the windows of a batch."""

    config: Any
    windows: int
    description: str


def training_cost(config: Any, kind: str, recipe: HeadRecipe, free: int) -> TrainingCost:
    """Measure what the training of a head costs for a target with this configuration (transformers').

    ``free``: bytes of memory. It takes some seconds to a minute.
    """
    dev = device()
    real = _Step(config, recipe.tokens_per_step // recipe.window, "the step itself")
    rate = _first_rate(dev)
    for step in _smaller(real):
        unrolled, memory = _counted(step, kind, recipe, recipe.depth)
        if step is real:
            plain, memory_bytes = _counted(step, kind, recipe, 1)[0], memory
            operations = recipe.plain * plain + (1 - recipe.plain) * unrolled
        if unrolled / rate <= _SECONDS and memory <= _MEMORY_SHARE * free:
            break
    seconds = _timed(step, kind, recipe, dev)
    return TrainingCost(str(dev), recipe, operations / unrolled * seconds, step.description, step is real,
                        seconds, memory_bytes, free)


def _smaller(real: _Step) -> Iterator[_Step]:
    """Yield the step itself, then ever smaller ones; the last is tiny."""
    yield real
    config, layers = real.config, real.config.num_hidden_layers
    if layers > _LAYERS:
        config = _changed(config, num_hidden_layers=_LAYERS)
    for windows in (real.windows, 1):
        yield _Step(config, windows, f"{config.num_hidden_layers} of {layers} layers, "
                                     f"{windows} of {real.windows} windows")
    for part in (2, 4, 8, 16):
        if config.num_attention_heads % part:
            return
        narrow = _changed(
            config, hidden_size=config.hidden_size // part,
            intermediate_size=config.intermediate_size // part,
            num_attention_heads=config.num_attention_heads // part,
            num_key_value_heads=max(1, config.num_key_value_heads // part),
            vocab_size=config.vocab_size // part)
        yield _Step(narrow, 1, f"{config.num_hidden_layers} of {layers} layers, 1 of {real.windows} windows, "
                               f"1/{part} of the width")


def _changed(config: Any, **fields: int) -> Any:
    fields_before = {key: value for key, value in config.to_dict().items() if key not in ("layer_types", "model_type")}
    return type(config)(**{**fields_before, **fields})


def _counted(step: _Step, kind: str, recipe: HeadRecipe, depth: int) -> tuple[float, int]:
    """(floating-point operations of matrix products in a step, bytes that it needs).

    A product with a parameter takes two operations a row forward, two for the input's gradient, two for its
    own.  Attention itself is left out: it is small beside them for windows of a few hundred tokens.  The
    target reads the text of every step, as in a run's first epoch.
    """
    student, config = _student(step.config, kind, recipe, torch.device("meta")), step.config
    tokens = step.windows * recipe.window
    rows = tokens + (depth - 1) * step.windows * min(recipe.chains, recipe.window)
    ranked = min(config.vocab_size, recipe.ranked) if isinstance(recipe, EagleRecipe) else config.vocab_size
    matrix = ranked * config.hidden_size
    layers = sum(p.numel() for p in student.target.model.layers.parameters())
    trained = [p for p in student.head.parameters() if p.requires_grad]
    total = 2 * (layers + matrix) * tokens + 6 * sum(p.numel() for p in trained) * rows
    if isinstance(student, Eagle2):  # whose outputs go through rows of the target's lm_head, which is frozen
        total += 4 * matrix * rows
    for name, p in student.head.named_parameters():
        if p.requires_grad and p.ndim == 2 and "lm_head" not in name:  # Muon's iterations
            short, long = sorted(p.shape)
            total += 5 * (4 * short**2 * long + 2 * short**3)
    embeddings = config.vocab_size * config.hidden_size
    weight_bytes = (layers + 2 * embeddings) * (2 if device().type == "cuda" else 4)
    batch = min(tokens, recipe.micro_batch)
    # In fp32: the head's embeddings; its weights, gradients, momentum and two temporary copies; logits of
    # target and head, their softmax and gradients.
    training_values = embeddings + 5 * sum(p.numel() for p in trained) + 6 * batch * ranked
    return total, weight_bytes + 4 * training_values


def _timed(step: _Step, kind: str, recipe: HeadRecipe, dev: torch.device) -> float:
    """Seconds of a step, after one that warms up; the weights are random."""
    student = _student(step.config, kind, recipe, dev)
    rows, noise, anchors = _batch(step.windows, step.config, recipe, dev)
    optimiser = optimiser_for(recipe, student.head)

    def loss(part: Tensor, part_noise: Tensor) -> Tensor:
        with torch.no_grad():
            reading = student.read(part)
        return student.step_loss(recipe.fade, part, reading, part_noise, anchors, recipe.depth)

    for _ in range(2):
        start = time.perf_counter()
        backpropagate(loss, dev, recipe.micro_batch // recipe.window, rows, noise)
        nn.utils.clip_grad_norm_(student.head.parameters(), 1.0)
        optimiser.step(recipe.steps // 2, recipe.steps)
        if dev.type == "cuda":
            torch.cuda.synchronize(dev)
        seconds = time.perf_counter() - start
    return seconds


def _student(config: Any, kind: str, recipe: HeadRecipe, dev: torch.device) -> UnrolledStudent:
    """Return an untrained head and a target with random weights."""
    dtype = torch.bfloat16 if dev.type == "cuda" else torch.float32
    with dev:
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        trainer = trainer_of(kind)
        drafted = min(config.vocab_size, trainer.drafts or config.vocab_size)
        student = trainer.new(target, recipe, _FirstTokens(config.vocab_size), drafted, None)
    assert isinstance(student, UnrolledStudent)
    return student


@dataclass(frozen=True)
class _FirstTokens:
    """In the place of a text's tokens: the first of ``vocabulary``."""

    vocabulary: int

    def most_frequent(self, size: int) -> Tensor:
        return torch.arange(min(self.vocabulary, size))

    def rarest(self) -> int:
        return self.vocabulary - 1


def _batch(windows: int, config: Any, recipe: HeadRecipe, dev: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, noise, and the anchors of the unrolled chains."""
    with dev:
        rows = torch.arange(windows * (recipe.window + 1)).view(windows, -1) % config.vocab_size
        noise = torch.zeros(windows, 1, 1)
        starts = recipe.window - recipe.depth + 1
        anchors = torch.arange(0, starts, max(1, starts // recipe.chains))[: recipe.chains]
    return rows, noise, anchors


def _first_rate(dev: torch.device) -> float:
    """Floating-point operations a second of a large product."""
    dtype = torch.bfloat16 if dev.type == "cuda" else torch.float32
    x = torch.ones(_PROBE, _PROBE, device=dev, dtype=dtype)
    for _ in range(2):
        start = time.perf_counter()
        (x @ x).sum().item()
        seconds = time.perf_counter() - start
    return 2 * _PROBE**3 / seconds
