"""generation_config.json: the sampling settings that a model's authors recommend."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any, Literal

from flowspec_edge.errors import UsageError
from flowspec_edge.model.modeldir import ModelDir
from flowspec_edge.sampling.settings import Sampling

_FILE = "generation_config.json"
Origin = Literal["command line", "generation_config.json", "default"]

# Setting -> its neutral values.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "no_repeat_ngram_size": (0, None),
    "min_new_tokens": (0, None),
    "min_length": (0, None),
    "num_beams": (1, None),
    "penalty_alpha": (0, None),
    "guidance_scale": (1, None),
    "bad_words_ids": ([], None),
    "suppress_tokens": ([], None),
    "begin_suppress_tokens": ([], None),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": ({}, [], None),
    "exponential_decay_length_penalty": (None,),
    "stop_strings": ([], None),
}
# The same for settings without effect on greedy decoding.
_NOT_APPLIED_DRAWING: dict[str, tuple[Any, ...]] = {
    "min_p": (0, None),
    "typical_p": (1, None),
    "epsilon_cutoff": (0, None),
    "eta_cutoff": (0, None),
    "top_h": (None,),
}


def choose_sampling(requested: Sampling, set_by_user: Collection[str], model: ModelDir
                    ) -> tuple[Sampling, dict[str, Origin]]:
    """``requested``, completed by generation_config.json, and the origin of each value.

    ``set_by_user`` names the user's options, which take precedence.  Only with ``do_sample`` does the file
    recommend temperature (1 if absent), top_k and top_p; transformers' defaults are no recommendation.
    """
    origins: dict[str, Origin] = {
        name: "command line" if name in set_by_user else "default" for name in asdict(requested)}
    if model.generation_config.get("do_sample"):
        taken = {name: value for name, value in _recommended(model).items() if name not in set_by_user}
        try:
            requested = replace(requested, **taken)
        except UsageError as error:
            raise UsageError(f"{model.target / _FILE}: {error}") from error
        origins |= dict.fromkeys(taken, "generation_config.json")
    return requested, origins


def _recommended(model: ModelDir) -> dict[str, Any]:
    advice: dict[str, Any] = {"temperature": 1.0}
    for name in ("temperature", "top_k", "top_p"):
        value = model.generation_config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{model.target / _FILE}: {name} must be a number, not {value!r}")
        advice[name] = max(0, int(value)) if name == "top_k" else float(value)  # -1 means off too
    return advice


def not_applied(model: ModelDir, sampling: Sampling) -> list[str]:
    """Settings in generation_config.json that are ignored but would change the text, as "name value"."""
    config = model.generation_config
    settings = _NOT_APPLIED if sampling.greedy else _NOT_APPLIED | _NOT_APPLIED_DRAWING
    return [f"{name} {config[name]}" for name, neutral in settings.items()
            if name in config and config[name] not in neutral]
