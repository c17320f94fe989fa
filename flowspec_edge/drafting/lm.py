"""A small causal language model as the drafter: all its layers are one stage, which has no neighbours.

Tree rows see all of the text, despite a sliding window; that can only worsen drafts in longer texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowspec_edge.drafting import checkpoint
from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.format import DraftFormat, Loaded, Surroundings, TargetFacts
from flowspec_edge.drafting.recorded import PassInputs, PassModel, RecordedPasses
from flowspec_edge.drafting.tree_cache import CacheMemory, CacheShape
from flowspec_edge.drafting.tree_drafter import Rows, TreeDrafter
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.model.draft_kind import Shapes
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.stage.families.rotary import RotaryTable
from flowspec_edge.stage.layers.kinds import KeysValues
from flowspec_edge.stage.output_head import load_output_head
from flowspec_edge.stage.shard import Shard, load_shard
from flowspec_edge.util.tensors import DTYPES
from flowspec_edge.util.torchdevice import release
from flowspec_edge.util.weight_file import EmbeddingTable


class LanguageModel:
    """A small model with all its layers in ``stage``; ``lm_head`` maps what follows its norm to logits."""

    def __init__(self, stage: Shard, lm_head: nn.Module) -> None:
        assert stage.embed is not None
        self._stage, self._lm_head, self._embed = stage, lm_head, stage.embed
        self.vocabulary = stage.config.vocab_size
        self._rotations = {turn: RotaryTable(stage.rotary, turn, stage.dtype, stage.device)
                           for turn in dict.fromkeys(stage.turns)}
        self.shape = CacheShape.from_config(stage.config, len(stage.modules),
                                            torch.empty(0, dtype=stage.dtype, device=stage.device))

    def outputs(self, states: Tensor | None, tokens: Tensor, positions: Tensor, mask: Any, cache: Any) -> Tensor:
        """Compute what follows the norm, [n, H], as ``PassModel.run`` does, without states."""
        stage, rows = self._stage, tokens if tokens.is_floating_point() else self._embed(tokens)
        if stage.embed_scale != 1.0:
            rows = rows * stage.embed_scale
        rotations = {turn: table(positions) for turn, table in self._rotations.items()}
        for layer, turn in zip(stage.modules, stage.turns, strict=True):
            layer(rows, rotations[turn], mask, cache, len(rows))
        assert stage.norm is not None
        normed: Tensor = stage.norm(rows)
        return normed

    def reach(self, position: int) -> None:
        """Make room for positions up to this one."""
        for table in self._rotations.values():
            table.reach(position)

    def logits(self, vocabulary: int | None, outputs: Tensor) -> Tensor:
        """[n, H] to [n, ``vocabulary``], or to fewer."""
        logits: Tensor = self._lm_head(outputs)
        return logits[:, :vocabulary]

    def pass_model(self, vocabulary: int | None) -> PassModel:
        experts = any(layer.experts is not None for layer in self._stage.modules)
        return PassModel(self.outputs, partial(self.logits, vocabulary), self._stage.hidden_size, False, self.reach,
                         self._embed if isinstance(self._embed, EmbeddingTable) else None,
                         "the host has to know which experts run" if experts else "")


class LMDrafter(TreeDrafter):
    """A session's drafter with a small model that shares the target's tokenizer.

    ``vocabulary`` is the target's, by default the model's.
    Where padding differs, tokens beyond the target's are not drafted, those beyond the model's read as its last.
    """

    def __init__(self, model: LanguageModel, vocabulary: int | None = None, memory: CacheMemory | None = None,
                 recorded: RecordedPasses | None = None) -> None:
        self._model, self._vocabulary = model, vocabulary
        super().__init__(model.shape, model.pass_model(vocabulary), None, memory, recorded)

    def clone_session(self, memory: CacheMemory | None = None, recorded: RecordedPasses | None = None
                      ) -> LMDrafter:
        """Return a drafter for a concurrent session: the same weights, another cache."""
        return LMDrafter(self._model, self._vocabulary, memory, recorded)

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        self._queue.extend(tokens)
        self._text_length += len(tokens)

    def shares_passes_with(self, other: Drafter) -> bool:
        return isinstance(other, LMDrafter) and other._model is self._model

    def _inputs(self, rows: Rows) -> PassInputs:
        text, nodes, placed = rows.text, rows.nodes, rows.placed
        start, last = self._cache.committed - len(text), self._model.vocabulary - 1
        tokens = [min(token, last) for token in (*text, *(node.token for node in nodes))]
        positions = [*range(start, start + len(text)), *(node.position for node in nodes)]
        return PassInputs(tokens, positions, [], *placed)


def load_lm(path: Path, target: Path, vocabulary: int, dtype: torch.dtype, device: torch.device) -> LMDrafter:
    """Load a small model as a drafter for ``target``, of which only the tokenizer is read.

    ``vocabulary`` is the target's, padding included.
    UsageError if there is no model, or one that stages cannot run; FlowspecError if it cannot be loaded, shares no
    tokenizer or cannot draft trees.
    """
    if not (path / "config.json").is_file():
        raise UsageError(f"no draft model at {path}: config.json is missing")
    draft_model = OpenModel(path)
    own_vocabulary = draft_model.decoder.vocab_size
    if own_vocabulary != vocabulary:
        require_padding(path, target, own_vocabulary, vocabulary)
    name = next(name for name, torch_dtype in DTYPES.items() if torch_dtype == dtype)
    stage = load_shard(draft_model, 0, 1, name, device)
    if not all(isinstance(kind, KeysValues) for kind in stage.kinds):
        raise FlowspecError(f"{path}: models of type {stage.config.model_type!r} cannot draft trees: their recurrent "
                            "layers remember one text, not the branches of a tree")
    model = LanguageModel(stage, load_output_head(draft_model, name, device))
    release(device)
    return LMDrafter(model, vocabulary)


def require_padding(path: Path, target: Path, own_vocabulary: int, vocabulary: int) -> None:
    """Raise FlowspecError unless the vocabularies differ only in ids that no tokenizer gives."""
    sizes = (f"{path}: the draft model's vocabulary has {own_vocabulary} tokens, the target's {vocabulary}; "
             "they must share one tokenizer")
    tokens = [_tokens(directory) for directory in (path, target)]
    for directory, token_names in zip((path, target), tokens, strict=True):
        if not token_names:
            raise FlowspecError(f"{sizes}, and without one in {directory} it cannot be told whether they do")
    own_tokens, target_tokens = tokens
    shared = min(own_vocabulary, vocabulary)
    for directory, token_names in zip((path, target), tokens, strict=True):
        if (last := max(token_names)) >= shared:
            raise FlowspecError(f"{sizes}, but token {last} ({token_names[last]!r}) of {directory} is unknown to "
                                "the other")
    for token in sorted(own_tokens.keys() & target_tokens.keys()):
        if own_tokens[token] != target_tokens[token]:
            raise FlowspecError(f"{sizes}, but token {token} is {own_tokens[token]!r} here and "
                                f"{target_tokens[token]!r} there")


def _tokens(directory: Path) -> dict[int, str]:
    """Id to token; empty without a tokenizer."""
    from transformers import AutoTokenizer  # slow to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception:  # transformers and tokenizers raise many kinds of errors
        return {}
    return {number: token for token, number in tokenizer.get_vocab().items()}


class LanguageModelFormat(DraftFormat):
    """Reads small language models, and compares their tokenizer with the target's."""

    def needs_embedding(self, directory: Path) -> bool:
        return False

    def load(self, directory: Path, beside: Surroundings) -> Loaded:
        head = beside.lm_head
        model = load_lm(directory, beside.target, head.vocabulary, beside.dtype, head.device)
        return Loaded(model.clone_session, None)

    def config(self, directory: Path) -> dict[str, Any]:
        return checkpoint.read_config(directory, "a draft model")

    def fields(self, config: dict[str, Any]) -> dict[str, Any]:
        return config

    def check_fit(self, directory: Path, config: dict[str, Any], shapes: Shapes, target: TargetFacts) -> None:
        own_vocabulary = int(config["vocab_size"])
        if own_vocabulary != target.vocabulary:
            require_padding(directory, target.directory, own_vocabulary, target.vocabulary)


FORMAT = LanguageModelFormat()
