"""Strategies: pure decisions on what to draft, send and accept; one request each.

Begin with ``base`` and ``flowspec``.  A new strategy is a class here and an entry in ``registry``.
"""
