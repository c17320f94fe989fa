"""A verification device: a shard of the layers, its KV cache, and the rows it may compute."""
