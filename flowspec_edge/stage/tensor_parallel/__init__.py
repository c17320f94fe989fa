"""Tensor parallelism for the Megatron and Galaxy baselines; ``layout`` is where the two differ."""
