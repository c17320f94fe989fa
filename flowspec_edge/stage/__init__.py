"""A verification device: a shard of the layers, its KV cache, and the state machine that runs segments.

Start with ``engine``.  Order of imports: quant, weights, layers, the modules here.
"""
