"""generation_config.json: how the people who made a model want its tokens drawn.

Knows which of its settings ``Sampling`` has, and names those that would change the text and are not
applied.  The end-of-sequence ids are ``ModelDir.stop_ids``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any, Literal

from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.sampling import Sampling

_FILE = "generation_config.json"
Origin = Literal["command line", "generation_config.json", "default"]

# Setting -> the values that change nothing.
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
# The same for what only matters when tokens are drawn.
_NOT_APPLIED_DRAWING: dict[str, tuple[Any, ...]] = {
    "min_p": (0, None),
    "typical_p": (1, None),
    "epsilon_cutoff": (0, None),
    "eta_cutoff": (0, None),
    "top_h": (None,),
}


def choose_sampling(asked: Sampling, given: Collection[str], model: ModelDir
                    ) -> tuple[Sampling, dict[str, Origin]]:
    """What was asked, filled up with what the model's makers advise, and where each value came from.

    asked  the values of all options, defaults included
    given  the names of those that the user has given; they stand

    With ``do_sample`` the advice is temperature (1 where it is not said), top_k and top_p, as far as
    the file says them: the defaults that transformers has for absent ones are not advice.  Without
    it the advice is greedy decoding, which is the default anyway.
    """
    origins: dict[str, Origin] = {
        name: "command line" if name in given else "default" for name in asdict(asked)}
    if model.generation_config.get("do_sample"):
        taken = {name: value for name, value in _advice(model).items() if name not in given}
        try:
            asked = replace(asked, **taken)
        except UsageError as error:
            raise UsageError(f"{model.target / _FILE}: {error}") from error
        origins |= dict.fromkeys(taken, "generation_config.json")
    return asked, origins


def _advice(model: ModelDir) -> dict[str, Any]:
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
    """Settings of the model's generation_config.json that would change the text, as "name value"."""
    config = model.generation_config
    settings = _NOT_APPLIED if sampling.greedy else _NOT_APPLIED | _NOT_APPLIED_DRAWING
    return [f"{name} {config[name]}" for name, neutral in settings.items()
            if name in config and config[name] not in neutral]
