"""A draft model of transformers from its directory, and whether it fits the target.

Knows what can be wrong with such a directory, when two vocabularies are one, and how to find out
that a family of models cannot run on a drafter's tree.  Does not know how the drafter runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from flowspec_edge.drafting.lm import LMDrafter
from flowspec_edge.errors import FlowspecError, UsageError
from flowspec_edge.sampling import Sampling
from flowspec_edge.tree.requests import DraftNode, DraftRequest

# How far the drafter's log probabilities may be from the model's own.
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.5}


def load_lm(path: Path, target: Path, vocabulary: int, dtype: torch.dtype, device: torch.device) -> LMDrafter:
    """The draft model at ``path`` for the target at ``target``, of which only the tokenizer is read.

    vocabulary  the target's, padding included

    UsageError if there is no model, FlowspecError if it cannot be loaded, has other tokens than the
    target, or is of a kind that cannot draft trees.
    """
    model = _read(path, dtype).to(device)
    own = int(model.config.vocab_size)
    if own != vocabulary:
        _require_padding(path, target, own, vocabulary)
    unfit = f"{path}: models of type {model.config.model_type!r} cannot draft trees"
    try:
        drafter = LMDrafter(model, vocabulary)
        error = _error_on_a_tree(drafter, model, min(own, vocabulary))
    except Exception as fault:  # of a forward pass that was not made for this
        raise FlowspecError(f"{unfit}: {_first_line(fault)}") from fault
    if not error <= _TOLERANCE[dtype]:
        raise FlowspecError(f"{unfit}: on one, their log probabilities come out wrong by {error:.2g}")
    return drafter


def _read(path: Path, dtype: torch.dtype) -> Any:
    if not (path / "config.json").is_file():
        raise UsageError(f"no draft model at {path}: config.json is missing")
    logging.disable_progress_bar()  # a bar for a model of a few megabytes is noise on the terminal
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors raise many kinds for one fact
        raise FlowspecError(f"{path}: the draft model cannot be loaded: {_first_line(error)}") from error
    if report["missing_keys"]:  # transformers would go on with random weights
        raise FlowspecError(f"{path}: tensor {min(report['missing_keys'])} is missing from the draft model")
    return model


def _require_padding(path: Path, target: Path, own: int, vocabulary: int) -> None:
    """FlowspecError unless the vocabularies differ only in ids that no tokenizer gives."""
    sizes = (f"{path}: the draft model's vocabulary has {own} tokens, the target's {vocabulary}; "
             "they must share one tokenizer")
    tokens = [_tokens(directory) for directory in (path, target)]
    for directory, known in zip((path, target), tokens, strict=True):
        if not known:
            raise FlowspecError(f"{sizes}, and without one in {directory} there is no telling if they do")
    drafted, wanted = tokens
    shared = min(own, vocabulary)
    for directory, known in zip((path, target), tokens, strict=True):
        if (last := max(known)) >= shared:
            raise FlowspecError(f"{sizes}, but token {last} ({known[last]!r}) of {directory} is unknown to "
                                "the other")
    for token in sorted(drafted.keys() & wanted.keys()):
        if drafted[token] != wanted[token]:
            raise FlowspecError(f"{sizes}, but token {token} is {drafted[token]!r} here and "
                                f"{wanted[token]!r} there")


def _tokens(directory: Path) -> dict[int, str]:
    """Id to token of the tokenizer in a directory; empty if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception:  # again many kinds for one fact
        return {}
    return {number: token for token, number in tokenizer.get_vocab().items()}


@torch.inference_mode()
def _error_on_a_tree(drafter: LMDrafter, model: PreTrainedModel, vocabulary: int) -> float:
    """How far the drafter is from the model's own forward pass, for a root and two children of it.

    Some families take a tree's mask for something else, and say nothing.
    """
    text = [1 % vocabulary, 2 % vocabulary, 3 % vocabulary]
    drafter.commit(text, None)
    nodes = (DraftNode(0, -1, text[-1], 2), DraftNode(1, 0, 0, 3), DraftNode(2, 0, text[0], 3))
    errors = []
    for request, paths in ((nodes[:1], [[]]), (nodes[1:], [[nodes[1].token], [nodes[2].token]])):
        got = drafter.expand(DraftRequest(0, tuple(request), 1))
        for row, path in enumerate(paths):
            ids = torch.tensor([[*text, *path]], device=model.device)
            logits = model(input_ids=ids).logits[0, -1, : vocabulary].double()
            own = torch.log_softmax(logits, -1)[int(got.tokens[row, 0])]
            errors.append(abs(float(own) - float(got.scores[row, 0])))
    drafter.reset(Sampling(), "draft", 1.0)
    return float(np.max(errors))  # not a number, if one of them is not


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
