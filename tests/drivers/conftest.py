"""The models and profiles of the tests of clusters, and a stage's loop."""

from kits.cluster_fixtures import (
    demo_model,
    demo_prompts,
    eight_layers,
    ideal_profile,
    oracle_draft_model,
    real,
    small_vocabulary_model,
    start,
    tiny_model,
    untrained_draft_model,
    worker_model,
)

__all__ = ["demo_model", "demo_prompts", "eight_layers", "ideal_profile", "oracle_draft_model", "real",
           "small_vocabulary_model", "start", "tiny_model", "untrained_draft_model", "worker_model"]
