"""The interface by which a kind of draft model is read: its module's ``FORMAT``.

``model.draft_kinds`` names the module of each kind.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.candidates import narrowed
from flowspec_edge.drafting.checkpoint import EMBEDDING, HeadFiles
from flowspec_edge.errors import FlowspecError
from flowspec_edge.model.candidates import Candidates
from flowspec_edge.model.decoder_config import DecoderConfig
from flowspec_edge.model.draft_kind import DraftKind, Shapes
from flowspec_edge.model.output_head import OutputHead
from flowspec_edge.util.torchdevice import release
from flowspec_edge.util.weight_file import Embedding

log = logging.getLogger(__name__)


class Preparable(Protocol):
    """A head whose weights are joined where they will be used."""

    def to(self, device: torch.device, /) -> Any: ...

    def prepare(self) -> None: ...


_Head = TypeVar("_Head", bound=Preparable)


@dataclass(frozen=True)
class Surroundings:
    """What a draft model is loaded beside.

    target     directory of the target, with its tokenizer
    lm_head    the target's; the drafter works on its device
    embedding  the target's, or None if it is not needed
    layers     number of the target's layers
    dtype      of weights, cache and arithmetic
    quantise   replaces those linears that have weights; it is called after each tensor
    candidates of a head that ranks by the target's whole lm_head; None: it reads all of the matrix
    """

    target: Path
    lm_head: OutputHead
    embedding: Embedding | None
    layers: int
    dtype: torch.dtype
    quantise: Callable[[nn.Module], None]
    candidates: Candidates | None = None

    def narrowed(self, head: nn.Module, rank_states: Callable[[Tensor, nn.Module], Tensor]) -> nn.Module:
        """Return what ranks by the target's lm_head for ``head``, which is :meth:`placed`.

        It is a candidate head if one is wanted, and lm_head's rows can be looked up.  ``rank_states`` as for
        ``candidates.narrowed``.
        """
        if self.candidates is None:
            return self.lm_head
        if not self.lm_head.looks_up_rows:
            log.warning("the draft head ranks by all of lm_head: no row of it can be looked up in this layout, so a "
                        "candidate head would gain nothing")
            return self.lm_head
        return narrowed(head, rank_states, self.lm_head, self.candidates, self.quantise)

    def placed(self, head: _Head) -> _Head:
        """Move a head to the drafter's device, and prepare it there."""
        head.to(self.lm_head.device)
        head.prepare()
        release(self.lm_head.device)
        return head


@dataclass(frozen=True)
class TargetFacts:
    """What a draft model must fit.

    directory   of the target, with its tokenizer
    width       of its hidden states
    vocabulary  tokens of its embeddings
    """

    directory: Path
    width: int
    vocabulary: int
    layers: int


@dataclass(frozen=True)
class Loaded:
    """A draft model that has been loaded.

    make        makes a drafter for a session; drafters share the draft model
    vocabulary  tokens of the text that the draft model reads; None: compared with the target's already
    """

    make: Callable[..., Drafter]
    vocabulary: int | None


class DraftFormat(ABC):
    """Reads one kind of draft model.

    ``directory`` holds the draft model; for a layer of a target, it is the target's checkpoint.
    """

    def needs_embedding(self, directory: Path) -> bool:
        """Whether :meth:`load` needs the target's embeddings."""
        return not HeadFiles(directory).has_embedding

    @abstractmethod
    def load(self, directory: Path, beside: Surroundings) -> Loaded:
        """Load the draft model.

        UsageError if there is none, FlowspecError for damaged weights or those of another target.
        """

    @abstractmethod
    def config(self, directory: Path) -> Any:
        """Return the configuration of its layers, as config.json and the headers of the weights have it."""

    def fields(self, config: Any) -> dict[str, Any]:
        """Return the fields of :meth:`config` by their names."""
        return vars(config)

    def widths(self, directory: Path, config: Any, shapes: Shapes, layers: int) -> Iterable[int]:
        """Every width that its config.json and tensors give to the target's states.

        FlowspecError if it reads states of a layer that a target of ``layers`` lacks.
        """
        return ()

    def check_fit(self, directory: Path, config: Any, shapes: Shapes, target: TargetFacts) -> None:
        """Raise FlowspecError, with both numbers, if the draft model was made for another target.

        Its :meth:`config` and the shapes of its tensors are compared with the target's.
        """
        vocabularies = [config.vocab_size, *([shapes[EMBEDDING][0]] if EMBEDDING in shapes else [])]
        for width in self.widths(directory, config, shapes, target.layers):
            require_fit(directory, "width", width, target.width)
        for size in vocabularies:
            require_fit(directory, "vocabulary", size, target.vocabulary)

    def unread(self) -> frozenset[str]:
        """Tensors in its files that are the target's, and are not read, by their authors' names."""
        return frozenset()


class HeadFormat(DraftFormat):
    """Reads a head, whose size follows from its configuration or from its target's."""

    @abstractmethod
    def on_meta(self, directory: Path) -> nn.Module:
        """Return the head's module without memory. The module's ``config`` is its configuration."""

    @abstractmethod
    def usual(self, target: DecoderConfig, kind: DraftKind) -> nn.Module:
        """Return the module of a usual one for a target of the configuration ``target``, without memory."""

    def cached_layers(self, head: nn.Module) -> int:
        """Layers of a module that keep keys and values."""
        return 1


class OwnLayerFormat(HeadFormat):
    """Reads a layer of the target's own checkpoint, which therefore fits."""

    @abstractmethod
    def tensors(self, config: Any) -> Shapes:
        """Shapes of its tensors, by their names in the checkpoint."""

    def check_fit(self, directory: Path, config: Any, shapes: Shapes, target: TargetFacts) -> None:
        """Accept every target, since the head is the target's own."""


def format_of(kind: DraftKind) -> DraftFormat:
    """Import the module that reads ``kind``."""
    draft_format: DraftFormat = import_module(kind.module).FORMAT
    return draft_format


def head_format_of(kind: DraftKind) -> HeadFormat:
    """Return the format of a kind with ``is_head``."""
    head_format = format_of(kind)
    assert isinstance(head_format, HeadFormat)
    return head_format


def own_layer_format_of(kind: DraftKind) -> OwnLayerFormat:
    """Return the format of a kind with ``in_target``."""
    layer_format = format_of(kind)
    assert isinstance(layer_format, OwnLayerFormat)
    return layer_format


def require_fit(directory: Path, quantity: str, heads: int, targets: int) -> None:
    """Raise FlowspecError if the head was trained for another target."""
    if heads != targets:
        unit = " tokens" if quantity == "vocabulary" else ""
        raise FlowspecError(f"{directory}: the head's {quantity} is {heads}{unit}, the target's {targets}; "
                            "a head works with the target that it was trained for only")


def require_vocabulary(directory: Path, vocabulary: int, target: OutputHead) -> None:
    """Raise FlowspecError unless a draft model reads as many tokens as the target ranks."""
    if vocabulary != target.vocabulary:
        raise FlowspecError(f"{directory}: the draft model's vocabulary has {vocabulary} tokens, "
                            f"the target's {target.vocabulary}; they must share one tokenizer")
