"""Draft models: they turn committed text and tree nodes into ranked children.

Begin with ``base`` (the interface) and ``load`` (from a model directory to a drafter).
"""
