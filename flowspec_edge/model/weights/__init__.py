"""A checkpoint's weights: ``located`` decides which files hold them, ``checkpoint`` reads them, for targets, draft
models and sharding alike.

A further file format is a ``WeightFile`` that ``files`` opens by its name, and its name in ``located``.
"""
