"""A checkpoint's weights, for targets, draft models and sharding alike.

``located`` decides which files hold them, ``checkpoint`` reads them.
A further file format is a ``WeightFile`` that ``files`` opens by its name, and its name in ``located``.
"""
