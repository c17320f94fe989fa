"""A small causal language model of transformers as the drafter.

Tree rows see all of the text, despite a sliding window; that can only worsen drafts in longer texts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from flowspec_edge.drafting import checkpoint
from flowspec_edge.drafting.base import Drafter
from flowspec_edge.drafting.format import DraftFormat, Loaded, Surroundings, TargetFacts
from flowspec_edge.drafting.fused import RotaryTable, fuse_model
from flowspec_edge.drafting.recorded import PassInputs, PassModel, RecordedPasses
from flowspec_edge.drafting.tree_cache import CacheMemory, CacheShape, JointCache, PassCache, additive_mask
from flowspec_edge.drafting.tree_drafter import Rows, TreeDrafter, joined
from flowspec_edge.errors import FlowspecError, UsageError, first_line
from flowspec_edge.model.draft_kind import Shapes
from flowspec_edge.model.families import family_of
from flowspec_edge.sampling.rule import Sampling
from flowspec_edge.tree.draft_api import DraftNode, DraftRequest
from flowspec_edge.util.bounded_read import UncachedFile
from flowspec_edge.util.tensors import check_finite, indices, no_loading_bars
from flowspec_edge.util.torchdevice import release
from flowspec_edge.util.weight_file import SAFETENSORS

log = logging.getLogger(__name__)


class LMDrafter(TreeDrafter):
    """``model`` shares the target's tokenizer; ``vocabulary`` is the target's, by default the model's.  Where
    padding differs, tokens beyond the target's are not drafted, those beyond the model's read as its last."""

    def __init__(self, model: PreTrainedModel, vocabulary: int | None = None,
                 shape: CacheShape | None = None, memory: CacheMemory | None = None,
                 recorded: RecordedPasses | None = None) -> None:
        self._model = model.eval().requires_grad_(False)
        self._last_token = model.get_input_embeddings().weight.shape[0] - 1
        self._vocabulary = vocabulary
        shape = shape or _cache_shape(model)
        rotary = getattr(model.base_model, "rotary_emb", None)
        self._angles = rotary if isinstance(rotary, RotaryTable) else None
        # No method of this object: in a circle of references its cache would wait for the collector.
        super().__init__(shape, partial(_logits, model, vocabulary), None, memory, recorded)

    def clone_session(self, memory: CacheMemory | None = None, recorded: RecordedPasses | None = None
                      ) -> LMDrafter:
        """For a concurrent session: the same weights, another cache."""
        return LMDrafter(self._model, self._vocabulary, self.shape, memory, recorded)

    def commit(self, tokens: Sequence[int], features: Tensor | None, rows: Sequence[int] = ()) -> None:
        self._queue.extend(tokens)
        self._text_length += len(tokens)

    def shares_passes_with(self, other: Drafter) -> bool:
        return isinstance(other, LMDrafter) and other._model is self._model

    def _inputs(self, rows: Rows) -> PassInputs:
        text, nodes, placed = rows.text, rows.nodes, rows.placed
        start = self._cache.committed - len(text)
        tokens = [min(token, self._last_token) for token in (*text, *(node.token for node in nodes))]
        positions = [*range(start, start + len(text)), *(node.position for node in nodes)]
        if self._angles is not None:
            self._angles.reach(max(positions))
        return PassInputs(tokens, positions, [], *placed)

    def _compute(self, parts: Sequence[tuple[TreeDrafter, Rows, PassInputs]]) -> list[Tensor]:
        counts = [len(rows) for _, rows, _ in parts]
        of_all, memory, device = joined([own for *_, own in parts]), self._cache.memory, self.shape.device
        cache: PassCache | JointCache
        if memory.shared or len(parts) == 1:
            mask = additive_mask(of_all.visible, self.shape.dtype, device)
            cache = PassCache(memory, indices(of_all.rows, device), of_all.visible.shape[1])
        else:
            cache = JointCache([drafter._cache.for_pass(rows.placed) for drafter, rows, _ in parts], counts)
            mask = cache.mask([drafter._cache.mask(rows.placed) for drafter, rows, _ in parts])
        numbers = indices([of_all.tokens, of_all.positions], device)
        return list(_outputs(self._model, None, numbers[0], numbers[1], mask, cache).split(counts))

    def pass_model(self) -> PassModel:
        return PassModel(partial(_outputs, self._model), self._logits, self._model.config.hidden_size, False,
                         None if self._angles is None else self._angles.reach,
                         unfit="" if self._angles is not None else "its layers are transformers' own")


def _outputs(model: PreTrainedModel, _: Tensor | None, tokens: Tensor, positions: Tensor, mask: Tensor,
             cache: PassCache | JointCache) -> Tensor:
    """Last hidden states [n, H] of ``tokens`` [n]."""
    out: Tensor = model.base_model(
        input_ids=tokens[None],
        position_ids=positions[None],
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return out[0]


def _logits(model: PreTrainedModel, vocabulary: int | None, outputs: Tensor) -> Tensor:
    """Last hidden states [n, H] to [n, target's vocabulary], as the model computes them."""
    config = model.config
    logits: Tensor = model.get_output_embeddings()(outputs)[:, :vocabulary]
    logits = logits * (getattr(config, "logit_scale", None) or 1.0)  # Cohere
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits


@torch.inference_mode()
def _cache_shape(model: PreTrainedModel) -> CacheShape:
    """From a forward pass, since config.json has many names for it.  ValueError for a model that keeps
    anything but keys and values, all of one shape."""
    cache = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True
                  ).past_key_values
    layers = getattr(cache, "layers", ())
    states = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    shapes = {tuple(state.shape) for state in states if isinstance(state, Tensor)}
    if len(shapes) != 1 or any(state is None for state in states):
        raise ValueError("its layers do not all keep keys and values of one shape")
    [(_, kv_heads, _, head_dim)] = shapes
    return CacheShape(len(layers), kv_heads, head_dim, model.dtype, model.device)


# How far the drafter's log probabilities may be from the model's own.
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.5}


def load_lm(path: Path, target: Path, vocabulary: int, dtype: torch.dtype, device: torch.device,
            fused: bool | None = None) -> LMDrafter:
    """Of ``target`` only the tokenizer is read; ``vocabulary`` is the target's, padding included.  ``fused``:
    a Llama-like model computes in few kernel launches; None: on CUDA.  UsageError if there is no model,
    FlowspecError if it cannot be loaded, shares no tokenizer or cannot draft trees."""
    model = _read(path, dtype, device)
    own = int(model.config.vocab_size)
    if own != vocabulary:
        require_padding(path, target, own, vocabulary)
    shared = min(own, vocabulary)
    unfit = f"{path}: models of type {model.config.model_type!r} cannot draft trees"
    try:
        drafter = LMDrafter(model, vocabulary)
        expected = _on_a_tree(model, shared)
        error = _error_on_a_tree(drafter, expected)
    except Exception as fault:  # forward passes raise many kinds of errors
        raise FlowspecError(f"{unfit}: {first_line(fault)}") from fault
    if not error <= _TOLERANCE[dtype]:
        raise FlowspecError(f"{unfit}: on one, their log probabilities come out wrong by {error:.2g}")
    if not (device.type == "cuda" if fused is None else fused) or not fuse_model(model):
        return drafter
    release(device)
    drafter = LMDrafter(model, vocabulary, drafter.shape)
    error = _error_on_a_tree(drafter, expected)
    if error <= _TOLERANCE[dtype]:
        return drafter
    log.warning("%s: in few kernel launches, log probabilities come out wrong by %.2g: transformers' own "
                "layers draft, and are slower", path, error)
    return LMDrafter(_read(path, dtype, device), vocabulary, drafter.shape)


def _read(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    if not (path / "config.json").is_file():
        raise UsageError(f"no draft model at {path}: config.json is missing")
    try:
        with no_loading_bars():
            if (model := _read_in_pieces(path, dtype, device)) is not None:
                return model
            model, report = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True)
    except FlowspecError:
        raise
    except Exception as error:  # transformers and safetensors raise many kinds of errors
        raise FlowspecError(f"{path}: the draft model cannot be loaded: {first_line(error)}") from error
    if report["missing_keys"]:  # transformers would use random weights
        raise FlowspecError(f"{path}: tensor {min(report['missing_keys'])} is missing from the draft model")
    model = model.to(device)
    for file in path.glob(f"*{SAFETENSORS}"):  # transformers maps them
        UncachedFile(file).drop()
    return model


def _read_in_pieces(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """A Llama-like model, tensor by tensor: transformers holds it twice, on the CPU and on the device, which
    share their memory on a board.  None if the files' tensors are not those of the model."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if (not family_of(config).llama_like or getattr(config, "quantization_config", None)
            or not any(path.glob(f"*{SAFETENSORS}"))):
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    stored = checkpoint.read_weights(path, "a draft model")
    wanted = {name: weight.shape for name, weight in model.named_parameters()}  # one name of tied ones
    if any(name not in stored or stored[name].shape != shape for name, shape in wanted.items()):
        return None
    for name in wanted:
        tensor = stored[name].read()
        check_finite(tensor, dtype, f"{path}: tensor {name}")
        model.load_state_dict({name: tensor.to(dtype).to(device)}, strict=False, assign=True)
    model.tie_weights()
    model.base_model.rotary_emb = type(model.base_model.rotary_emb)(config).to(device)  # is not stored
    return model.requires_grad_(False)


def require_padding(path: Path, target: Path, own: int, vocabulary: int) -> None:
    """FlowspecError unless the vocabularies differ only in ids that no tokenizer gives."""
    sizes = (f"{path}: the draft model's vocabulary has {own} tokens, the target's {vocabulary}; "
             "they must share one tokenizer")
    tokens = [_tokens(directory) for directory in (path, target)]
    for directory, known in zip((path, target), tokens, strict=True):
        if not known:
            raise FlowspecError(f"{sizes}, and without one in {directory} it cannot be told whether they do")
    own_tokens, target_tokens = tokens
    shared = min(own, vocabulary)
    for directory, known in zip((path, target), tokens, strict=True):
        if (last := max(known)) >= shared:
            raise FlowspecError(f"{sizes}, but token {last} ({known[last]!r}) of {directory} is unknown to "
                                "the other")
    for token in sorted(own_tokens.keys() & target_tokens.keys()):
        if own_tokens[token] != target_tokens[token]:
            raise FlowspecError(f"{sizes}, but token {token} is {own_tokens[token]!r} here and "
                                f"{target_tokens[token]!r} there")


def _tokens(directory: Path) -> dict[int, str]:
    """Id to token; empty without a tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception:  # as above
        return {}
    return {number: token for token, number in tokenizer.get_vocab().items()}


_TEXT = [1, 2, 3]
_PATHS: list[list[int]] = [[], [0], [1]]  # below the text: a root and two children of it


@torch.inference_mode()
def _on_a_tree(model: PreTrainedModel, vocabulary: int) -> list[Tensor]:
    """The model's own log probabilities [vocabulary] after each path, by full passes."""
    found = []
    for path in _PATHS:
        ids = torch.tensor([[token % vocabulary for token in (*_TEXT, *path)]], device=model.device)
        found.append(torch.log_softmax(model(input_ids=ids).logits[0, -1, :vocabulary].double(), -1))
    return found


def _error_on_a_tree(drafter: LMDrafter, expected: Sequence[Tensor]) -> float:
    """The largest difference from ``expected``: some families misread a tree's mask without an error."""
    vocabulary = len(expected[0])
    drafter.commit([token % vocabulary for token in _TEXT], None)
    root = DraftNode(0, -1, _TEXT[-1] % vocabulary, 2)
    children = [DraftNode(1 + i, 0, path[0] % vocabulary, 3) for i, path in enumerate(_PATHS[1:])]
    errors = []
    for nodes, own in (([root], expected[:1]), (children, expected[1:])):
        got = drafter.expand(DraftRequest(0, tuple(nodes), 1))
        errors += [abs(float(log_p[token]) - score) for log_p, token, score in
                   zip(own, got.tokens[:, 0].tolist(), got.scores[:, 0].tolist(), strict=True)]
    drafter.reset(Sampling(), "draft", 1.0)
    return float(np.max(errors))  # unlike max(), keeps NaN


class LanguageModelFormat(DraftFormat):
    """Reads small language models, and compares their tokenizer with the target's."""

    def needs_embedding(self, directory: Path) -> bool:
        return False

    def load(self, directory: Path, beside: Surroundings) -> Loaded:
        head = beside.lm_head
        model = load_lm(directory, beside.target, head.vocabulary, beside.dtype, head.device, beside.fused)
        return Loaded(model.clone_session, None)

    def config(self, directory: Path) -> dict[str, Any]:
        return checkpoint.read_config(directory, "a draft model")

    def fields(self, config: dict[str, Any]) -> dict[str, Any]:
        return config

    def check_fit(self, directory: Path, config: dict[str, Any], shapes: Shapes, target: TargetFacts) -> None:
        own = int(config["vocab_size"])
        if own != target.vocabulary:
            require_padding(directory, target.directory, own, target.vocabulary)


FORMAT = LanguageModelFormat()
