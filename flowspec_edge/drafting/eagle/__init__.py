"""EAGLE draft heads; begin with ``eagle2``, the smaller of the two."""
