"""``flowspec generate``, ``chat`` and ``demo``: text in the terminal; begin at ``command`` (generate)."""
