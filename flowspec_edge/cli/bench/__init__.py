"""``flowspec bench``, ``sweep`` and ``reproduce``: one measurement; begin at ``measure``."""
