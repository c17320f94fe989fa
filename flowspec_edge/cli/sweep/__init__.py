"""``flowspec sweep``: one measurement at several values of an axis; begin at ``commands``."""
