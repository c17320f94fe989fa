"""EAGLE-3 checkpoints as they are published: config.json and the weights.

Knows tensor names and shapes, what config.json says of captured layers and of the draft vocabulary,
and is strict about all of it.  Does not know how the head is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from flowspec_edge.drafting import weights
from flowspec_edge.drafting.eagle3 import CAPTURED, Eagle3Head, captured_layers
from flowspec_edge.drafting.eagle_checkpoint import PUBLISHED, require_fit
from flowspec_edge.errors import FlowspecError

_WHAT = "an EAGLE-3 head"
_EMBEDDING = "embed_tokens.weight"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OWN = ("draft_vocab_size", "target_hidden_size", _LAYER_IDS, "eagle_config")
# Switches of heads with other arithmetic, which other tools publish under the same architecture.
_OTHERS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def load_head3(directory: Path, embedding: Tensor | None, dtype: torch.dtype) -> Eagle3Head:
    """Read a head; ``embedding`` [V, H], the target's, stands in where the file has none.

    Raises UsageError when the directory or a file in it is missing; FlowspecError when a tensor is
    missing, unexpected, misshapen or unreadable, which the text names, or when the head does not fit
    the target, with both numbers.
    """
    config = head3_config(directory)
    stored = weights.plain_names(weights.read_weights(directory, _WHAT), directory)
    if embedding is not None:
        require_fit(directory, "vocabulary", config.vocab_size, len(embedding))
        if config.target_hidden_size != embedding.shape[1]:
            raise FlowspecError(
                f"{directory}: the head takes states of width {config.target_hidden_size}, the target's have "
                f"{embedding.shape[1]}; a head works with the target that it was trained for only"
            )
        if _EMBEDDING not in stored:
            if embedding.shape[1] != config.hidden_size:
                raise FlowspecError(f"{directory}: the head's width is {config.hidden_size}, the target's "
                                    f"{embedding.shape[1]}, and it brings no {_EMBEDDING} of its own")
            stored[_EMBEDDING] = embedding
    _check_fc(directory, stored, config)
    _drop_identity(stored, config)
    head = head3_skeleton(config)
    weights.assign(head, stored, directory, _WHAT, dtype)
    head.rotary_emb = type(head.rotary_emb)(config)  # its buffers are computed, not stored
    _check_draft_vocabulary(directory, head)
    return head.eval()


def save_head3(head: Eagle3Head, directory: Path, dtype: torch.dtype, with_embedding: bool = False) -> None:
    """Write config.json and model.safetensors in ``dtype``; the embedding is the target's as a rule."""
    facts = head.config.to_dict()
    config = {key: facts[key] for key in (*PUBLISHED, *_OWN) if key in facts}
    config.update(architectures=["LlamaForCausalLMEagle3"], torch_dtype=str(dtype).removeprefix("torch."),
                  rope_theta=facts["rope_parameters"]["rope_theta"])
    stored = {name: weight for name, weight in head.state_dict().items()
              if with_embedding or name != _EMBEDDING}
    weights.write(directory, config, stored, dtype)


def head3_skeleton(config: LlamaConfig) -> Eagle3Head:
    """A head of this shape on the meta device: it costs no memory."""
    with torch.device("meta"):
        return Eagle3Head(config)


def head3_config(directory: Path) -> LlamaConfig:
    """What a head's config.json says; UsageError or FlowspecError when it cannot be used."""
    path = directory / "config.json"
    raw = weights.read_config(directory, _WHAT)
    if "transformer_layer_config" in raw:
        raise FlowspecError(f"{path} is in the format of the speculators library; "
                            "only heads as EAGLE's authors publish them can be read")
    for switch in _OTHERS:
        if raw.get(switch):
            raise FlowspecError(f"{path}: heads with {switch} are not supported")
    raw.pop("model_type", None)  # whatever the target's family, the layer is Llama's
    config = LlamaConfig.from_dict(raw)
    if config.num_hidden_layers != 1:
        raise FlowspecError(f"{path}: an EAGLE-3 head has one layer, not {config.num_hidden_layers}")
    for key, usual in (("target_hidden_size", config.hidden_size), ("draft_vocab_size", config.vocab_size)):
        if getattr(config, key, None) is None:
            setattr(config, key, usual)
    if config.draft_vocab_size > config.vocab_size:
        raise FlowspecError(f"{path}: draft_vocab_size {config.draft_vocab_size} is more than vocab_size "
                            f"{config.vocab_size}")
    return config


def head3_layers(directory: Path, config: Any, layers: int) -> tuple[int, ...]:
    """After how many of the target's ``layers`` the head's states are captured, in fc's order.

    What config.json names, itself or in ``eagle_config``, or else the usual ones.  Two ways of
    counting are in use: a list that begins with 1 counts the layers whose *outputs* are meant, any
    other those whose *inputs* are (SGLang tells them apart in the same way).

    FlowspecError for another number of states than fc takes, or a layer that the target does not have.
    """
    named = getattr(config, _LAYER_IDS, None) or (getattr(config, "eagle_config", None) or {}).get(_LAYER_IDS)
    if not named:
        return captured_layers(layers)
    path = directory / "config.json"
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise FlowspecError(f"{path}: {_LAYER_IDS} must be a list of layers, not {named!r}")
    if len(named) != CAPTURED:
        raise FlowspecError(f"{path}: {_LAYER_IDS} names {len(named)} layers, "
                            f"an EAGLE-3 head takes {CAPTURED}")
    passed = tuple(layer + (named[0] == 1) for layer in named)
    if min(passed) < 0 or max(passed) > layers:
        raise FlowspecError(f"{path}: {_LAYER_IDS} {named} reaches past the target, which has "
                            f"{layers} layers; a head works with the target that it was trained for only")
    return passed


def _check_fc(directory: Path, stored: dict[str, Tensor], config: LlamaConfig) -> None:
    """Its own line for what would come out as a wrong shape."""
    fc, width = stored.get("fc.weight"), config.target_hidden_size
    if fc is not None and fc.ndim == 2 and fc.shape[1] != CAPTURED * width:
        raise FlowspecError(f"{directory}: tensor fc.weight takes {fc.shape[1]} values, but {CAPTURED} "
                            f"captured states of width {width} have {CAPTURED * width}")


def _drop_identity(stored: dict[str, Tensor], config: LlamaConfig) -> None:
    """Equal vocabularies need no mapping; one that maps each token to itself may be there."""
    if config.draft_vocab_size == config.vocab_size and not stored.get("d2t", torch.ones(1)).any():
        stored.pop("d2t")
        stored.pop("t2d", None)


def _check_draft_vocabulary(directory: Path, head: Eagle3Head) -> None:
    """d2t must name distinct tokens of the target, and t2d the same ones."""
    if head.config.draft_vocab_size == head.config.vocab_size:
        return
    ids, vocabulary = head.target_ids(), head.config.vocab_size
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < vocabulary:
            raise FlowspecError(f"{directory}: tensor d2t maps a draft token to {extreme}, but the target's "
                                f"vocabulary has {vocabulary} tokens")
    if (distinct := len(ids.unique())) != len(ids):
        raise FlowspecError(f"{directory}: tensor d2t maps {len(ids)} draft tokens to {distinct} "
                            "of the target's")
    marked = int(head.t2d.sum())
    if marked != len(ids) or not head.t2d[ids].all():
        raise FlowspecError(f"{directory}: tensor t2d marks {marked} tokens, which are not the "
                            f"{len(ids)} that d2t maps to")
